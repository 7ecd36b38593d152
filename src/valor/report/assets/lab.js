start(() => data.figures.forEach(draw));
