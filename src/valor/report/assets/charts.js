// What the scripts of all pages share: the page's data, and figures as Plotly takes them but for what `paint` and `trace` do.
const data = JSON.parse(document.getElementById("run-data").textContent);
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const touch = matchMedia("(pointer: coarse)").matches;
const options = { displayModeBar: false, responsive: true };

// Colours are names of the style sheet, "--c1", or with an opacity, "--c1~29".
const paint = (part) => {
  if (typeof part === "string" && part.startsWith("--")) return color(part.slice(2).split("~")[0]) + (part.split("~")[1] ?? "");
  if (Array.isArray(part)) return part.map(paint);
  return part && typeof part === "object" ? Object.fromEntries(Object.entries(part).map(([key, one]) => [key, paint(one)])) : part;
};
// Running median, then mean, over a twentieth of the run around each step: no lag, and a spike stays out of the trend.
const running = (values, reach, summary) => values.map((value, i) => (
  value === null ? null : summary(values.slice(Math.max(0, i - reach), i + reach + 1).filter((one) => one !== null))));
const median = (numbers) => numbers.sort((a, b) => a - b)[numbers.length >> 1];
const mean = (numbers) => numbers.reduce((sum, one) => sum + one, 0) / numbers.length;
const smooth = (values) => {
  const reach = Math.max(2, Math.round(values.length / 40));
  return running(running(values, reach, median), reach, mean);
};
// `curve` names a metric of the page's data, drawn as it is or smoothed.
const trace = ({ curve, trend, ...others }) => {
  if (!curve) return paint(others);
  const [index, values] = data.metrics.curves[curve];
  return { ...paint(others), x: data.metrics.steps[index], y: trend ? smooth(values) : values };
};
const axis = () => ({
  gridcolor: color("grid"), linecolor: color("line"), zeroline: false, fixedrange: touch, automargin: true,
  tickfont: { size: 11.5 }, nticks: 6, exponentformat: "e",
});
const draw = ({ id, traces, layout }) => {
  const { xaxis, yaxis, ...others } = paint(layout);
  if (layout.height) byId(`plot-${id}`).style.height = `${layout.height}px`;
  Plotly.react(`plot-${id}`, traces.map(trace), {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 46, r: 8, t: 10, b: 38 }, hovermode: "closest",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("soft") },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12 } },
    showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom" }, dragmode: touch ? false : "zoom",
    ...others, xaxis: { ...axis(), ...xaxis }, yaxis: { ...axis(), ...yaxis },
  }, options);
};
const start = (drawAll) => {
  for (const one of document.querySelectorAll("details.numbers")) one.open = false; // without scripts they are all there is
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
  document.documentElement.dataset.ready = "yes";
};
