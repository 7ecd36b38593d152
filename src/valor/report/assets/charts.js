// What the scripts of all pages share: the page's data, elements, numbers as text, and the look of a chart.
const data = JSON.parse(document.getElementById("run-data").textContent);
const byId = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const faint = (hex) => `${hex}29`; // 16 % of it: Plotly knows no color-mix
const touch = matchMedia("(pointer: coarse)").matches;

const element = (tag, className, text) => {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const number = (value, unit) => {
  if (value === null || value === undefined) return "not finite";
  if (unit === "%") return `${(100 * value).toFixed(1)}%`;
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
};
const short = (value) => number(value === null ? null : Number(value.toPrecision(3)));
const base = () => ({
  paper_bgcolor: "rgba(0,0,0,0)",
  plot_bgcolor: "rgba(0,0,0,0)",
  font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("soft") },
  margin: { l: 46, r: 8, t: 10, b: 38 },
  showlegend: false,
  hovermode: "x unified",
  hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("ink"), size: 12 } },
  dragmode: touch ? false : "zoom",
  xaxis: {
    ...axis(), title: { text: "step", standoff: 2, font: { size: 11.5 } }, unifiedhovertitle: { text: "step %{x}" },
    spikecolor: color("soft"), spikethickness: 1, spikedash: "solid",
  },
  yaxis: axis(),
});
const guide = (x0, y0, x1, y1) => (
  { type: "line", x0, y0, x1, y1, layer: "below", line: { color: color("soft"), width: 1, dash: "2px,3px" } });
const axis = () => ({
  gridcolor: color("grid"), linecolor: color("line"), zeroline: false, fixedrange: touch, automargin: true,
  tickfont: { size: 11.5 }, nticks: 6, exponentformat: "e",
});
for (const one of document.querySelectorAll("details.numbers")) one.open = false; // without scripts they are all there is
const options = { displayModeBar: false, responsive: true };

const legend = (list, entries) => {
  list.replaceChildren(...entries.map(({ label, value, stroke, shape }) => {
    const item = element("li");
    const key = element("i", shape);
    key.style.color = stroke;
    key.style.borderTopColor = stroke;
    item.append(key, `${label} `, element("b", "", value));
    return item;
  }));
};
