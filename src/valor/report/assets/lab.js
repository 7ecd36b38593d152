// Draws the figures of the page as Plotly takes them; their colours are names of the style sheet: "--c1", "--c1~" if faint.
const paint = (part) => {
  if (typeof part === "string" && part.startsWith("--")) return part.endsWith("~") ? faint(color(part.slice(2, -1))) : color(part.slice(2));
  if (Array.isArray(part)) return part.map(paint);
  return part && typeof part === "object" ? Object.fromEntries(Object.entries(part).map(([key, one]) => [key, paint(one)])) : part;
};
const draw = () => data.figures.forEach(({ id, traces, layout }) => {
  const { xaxis, yaxis, ...others } = paint(layout);
  if (layout.height) byId(`plot-${id}`).style.height = `${layout.height}px`;
  const common = { ...base(), hovermode: "closest", margin: { l: 52, r: 8, t: 10, b: 40 }, showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" } };
  Plotly.react(`plot-${id}`, paint(traces), { ...common, ...others, xaxis: { ...axis(), ...xaxis }, yaxis: { ...axis(), ...yaxis } }, options);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
document.documentElement.dataset.ready = "yes";
