// A sweep: every arm's end and its distance from the control, and the curves of the arms that the reader chooses.
const MOST_AT_FIRST = 8; // arms whose curves are shown before the reader chooses
const stroke = (place) => color(`c${(place % 12) + 1}`);
const dash = (place) => (place < 12 ? "solid" : "5px,4px");
const shown = new Set(data.arms.slice(0, MOST_AT_FIRST).map((arm) => arm.name));

// One row an arm: its seeds as small dots, the mean with its interval as a large one.
const drawRows = (id, rows, level) => {
  const layout = base();
  const names = data.arms.map((arm) => arm.name);
  byId(`plot-${id}`).style.height = `${56 + 24 * names.length}px`;
  Object.assign(layout, { hovermode: "closest", margin: { l: 8, r: 12, t: 6, b: 26 } });
  layout.yaxis = { ...axis(), type: "category", categoryarray: names.toReversed(), categoryorder: "array", nticks: undefined, dtick: 1, range: [-0.6, names.length - 0.4] };
  layout.xaxis = axis();
  if (level !== null) layout.shapes = [{ ...guide(level, 0, level, 1), yref: "paper" }];
  const seeds = rows.flatMap(({ name, seeds }) => seeds.map((value) => ({ name, value })));
  const reach = (end) => rows.map(({ estimate }) => (estimate.low === null ? 0 : Math.abs(estimate[end] - estimate.mean)));
  Plotly.react(`plot-${id}`, [
    {
      x: seeds.map((one) => one.value), y: seeds.map((one) => one.name), mode: "markers", opacity: 0.55,
      marker: { size: 5, color: color("soft") }, hovertemplate: "%{y}, a seed: %{x:.4~g}<extra></extra>",
    },
    {
      x: rows.map((row) => row.estimate.mean), y: rows.map((row) => row.name), mode: "markers",
      marker: { size: 9, color: rows.map((row) => (row.strong ? color("accent") : color("paper"))), line: { width: 2, color: color("accent") } },
      error_x: { type: "data", symmetric: false, array: reach("high"), arrayminus: reach("low"), color: color("accent"), thickness: 1.5, width: 4 },
      hovertemplate: "%{y}: %{x:.4~g}<extra></extra>",
    },
  ], layout, options);
};

const drawEnds = () => {
  const done = data.arms.filter((arm) => arm.last.mean !== null);
  const control = done.find((arm) => arm.name === data.control);
  const ends = done.map((arm) => ({ name: arm.name, estimate: arm.last, seeds: Object.values(arm.finished).map((one) => one.last), strong: true }));
  drawRows("last", ends, control ? control.last.mean : null);
  const gaps = done.filter((arm) => arm.difference).map((arm) => (
    { name: arm.name, estimate: arm.difference, seeds: arm.difference.by_seed, strong: arm.difference.significant === true }));
  drawRows("gap", gaps, 0);
};

const drawCurve = (panel, place) => {
  const layout = base();
  const traces = data.arms.flatMap((arm, i) => {
    const curve = panel.arms[arm.name];
    if (!curve || !shown.has(arm.name)) return [];
    const bounded = curve.steps.filter((_, at) => curve.low[at] !== null && curve.high[at] !== null).length === curve.steps.length;
    const line = {
      x: curve.steps, y: curve.mean, name: arm.name, hovertemplate: "%{y:.4~g}",
      mode: curve.steps.length < 12 ? "lines+markers" : "lines",
      line: { color: stroke(i), width: 2, dash: dash(i) }, marker: { size: 5, color: stroke(i) },
    };
    return bounded ? [band(curve.steps, curve.high, curve.low, stroke(i)), line] : [line];
  });
  Plotly.react(`plot-curve-${place}`, traces, layout, options);
};
const drawCurves = () => data.curves.forEach(drawCurve);

const drawChips = () => {
  const chip = (label, pressed, choose) => {
    const button = element("button", "", label);
    button.type = "button";
    if (pressed !== null) button.setAttribute("aria-pressed", String(pressed));
    button.addEventListener("click", () => { choose(); drawChips(); drawCurves(); });
    return button;
  };
  const arms = data.arms.map(({ name }, place) => {
    const button = chip(name, shown.has(name), () => { if (!shown.delete(name)) shown.add(name); });
    const key = element("i", dash(place) === "solid" ? "" : "dash");
    key.style.borderTopColor = stroke(place);
    button.prepend(key);
    return button;
  });
  const all = chip("all", null, () => data.arms.forEach((arm) => shown.add(arm.name)));
  const none = chip("none", null, () => shown.clear());
  byId("arms").replaceChildren(...arms, all, none);
};

const draw = () => { drawEnds(); drawChips(); drawCurves(); };
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
document.documentElement.dataset.ready = "yes";
