// A critic's scorecard: histograms, calibration, what it knows along the response, and its values against branches.
const BLUE = () => color("c1");
const ORANGE = () => color("c2");
const panel = (id) => byId(`panel-${id}`)?.querySelector(".legend");
const titled = (layout, x, y) => {
  Object.assign(layout, { hovermode: "closest", margin: { l: 52, r: 8, t: 10, b: 40 } });
  layout.xaxis = { ...axis(), title: { text: x, standoff: 6, font: { size: 11.5 } } };
  layout.yaxis = { ...axis(), title: { text: y, standoff: 6, font: { size: 11.5 } } };
  return layout;
};
const line = (x, y, name, stroke, more) => (
  { x, y, name, mode: "lines+markers", line: { color: stroke, width: 2 }, marker: { size: 6, color: stroke }, ...more });

const drawVerdicts = () => {
  const { low, high, right, wrong } = data.verdicts;
  const width = (high - low) / right.length;
  const centres = right.map((_, i) => low + (i + 0.5) * width);
  const bars = (name, counts, stroke) => (
    { type: "bar", x: centres, y: counts, name, width, marker: { color: stroke, opacity: 0.6 }, hovertemplate: `${name}: %{y} at %{x:.3~g}<extra></extra>` });
  const layout = titled(base(), "value", "answers");
  layout.barmode = "overlay";
  Plotly.react("plot-verdicts", [bars("right", right, BLUE()), bars("wrong", wrong, ORANGE())], layout, options);
  const sum = (counts) => counts.reduce((total, one) => total + one, 0);
  legend(panel("verdicts"), [
    { label: "right", value: sum(right), stroke: BLUE(), shape: "box" },
    { label: "wrong", value: sum(wrong), stroke: ORANGE(), shape: "box" }]);
};

const drawCalibration = () => {
  const traces = [["last", "at the last token", BLUE()], ["all", "along the response", ORANGE()]].map(([key, name, stroke]) => {
    const bins = data.calibration[key].bins;
    return line(bins.map((one) => one.value), bins.map((one) => one.outcome), name, stroke, {
      customdata: bins.map((one) => one.count), hovertemplate: `${name}<br>value %{x:.3~g}, return %{y:.3~g}, %{customdata} states<extra></extra>` });
  });
  const every = traces.flatMap((one) => [...one.x, ...one.y]);
  const [low, high] = [Math.min(...every), Math.max(...every)];
  const layout = titled(base(), "value", "mean return");
  layout.shapes = [guide(low, low, high, high)];
  Plotly.react("plot-calibration", traces, layout, options);
  legend(panel("calibration"), traces.map((one, i) => (
    { label: one.name, value: `error ${short(Object.values(data.calibration)[i].ece)}`, stroke: one.line.color, shape: "" })));
};

const drawSeparation = () => {
  const layout = titled(base(), "share of the response written", "value");
  layout.xaxis.tickformat = ".0%";
  layout.hovermode = "x unified";
  const entries = [];
  const traces = [["right", BLUE()], ["wrong", ORANGE()]].flatMap(([side, stroke]) => {
    const points = data.positions.filter((one) => one[side]);
    if (!points.length) return [];
    const x = points.map((one) => one.at);
    const of = (name) => points.map((one) => one[side][name]);
    entries.push({ label: side, value: `${short(of("mean").at(-1))} at the end`, stroke, shape: "" });
    return [
      band(x, of("high"), of("low"), stroke),
      line(x, of("mean"), side, stroke, { hovertemplate: "%{y:.3~g}" }),
    ];
  });
  Plotly.react("plot-separation", traces, layout, options);
  legend(panel("separation"), entries);
};

// AUC and explained variance over places or turns.
const drawKnowledge = (id, points, x, label, format) => {
  const layout = titled(base(), label, "");
  layout.hovermode = "x unified";
  if (format) layout.xaxis.tickformat = format; else layout.xaxis.dtick = 1;
  layout.shapes = [{ ...guide(0, 0.5, 1, 0.5), xref: "paper" }];
  const traces = [["auc", "AUC", BLUE()], ["explained_variance", "explained variance", ORANGE()]].map(([key, name, stroke]) => (
    line(x, points.map((one) => one[key]), name, stroke, { hovertemplate: "%{y:.3~g}" })));
  Plotly.react(`plot-${id}`, traces, layout, options);
  legend(panel(id), traces.map((one) => ({ label: one.name, value: number(one.y.at(-1)), stroke: one.line.color, shape: "" })));
};

const drawBranches = ({ scatter, agreement }) => {
  const layout = titled(base(), "mean return of the branches", "value");
  const every = [...scatter.truth, ...scatter.value];
  const [low, high] = [Math.min(...every), Math.max(...every)];
  layout.shapes = [guide(low, low, high, high)];
  Plotly.react("plot-scatter", [{
    x: scatter.truth, y: scatter.value, mode: "markers", marker: { size: 6, color: BLUE(), opacity: 0.45 },
    hovertemplate: "value %{y:.3~g}, branches %{x:.3~g}<extra></extra>",
  }], layout, options);

  const order = titled(base(), "share of pairs in the right order", "");
  Object.assign(order.xaxis, { range: [0, 1.02], tickformat: ".0%" });
  Object.assign(order.yaxis, { visible: false, range: [-1, 1] });
  order.shapes = [{ ...guide(0.5, 0, 0.5, 1), yref: "paper" }];
  const known = agreement.mean !== null;
  Plotly.react("plot-order", known ? [{
    x: [agreement.mean], y: [0], mode: "markers", marker: { size: 12, color: BLUE() },
    error_x: agreement.low === null ? undefined : {
      type: "data", symmetric: false, array: [agreement.high - agreement.mean], arrayminus: [agreement.mean - agreement.low], color: BLUE(), thickness: 2, width: 7 },
    hovertemplate: "%{x:.1%}<extra></extra>",
  }] : [], order, options);
  legend(panel("order"), known ? [{ label: "mean and 95 % interval", value: number(agreement.mean, "%"), stroke: BLUE(), shape: "" }] : []);
};

const draw = () => {
  drawVerdicts();
  drawCalibration();
  drawSeparation();
  drawKnowledge("along-auc", data.positions, data.positions.map((one) => one.at), "share of the response written", ".0%");
  if (data.turns.length > 1) drawKnowledge("turns", data.turns, data.turns.map((one) => one.turn), "turn", "");
  if (data.monte_carlo) drawBranches(data.monte_carlo);
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
document.documentElement.dataset.ready = "yes";
