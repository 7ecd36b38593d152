const drawExplorer = () => draw({ id: "explorer", traces: [{ curve: byId("explorer-key").value, line: { color: "--c1" } }], layout: { showlegend: false } });
const drawn = new Set(data.figures.flatMap((figure) => figure.traces.map((one) => one.curve)));
const keys = Object.keys(data.metrics.curves);
if (keys.length) {
  byId("explorer-key").replaceChildren(...keys.map((key) => new Option(key)));
  byId("explorer-key").value = keys.find((key) => !drawn.has(key) && !/^(timing_|training\/global_step)/.test(key)) || keys[0];
  byId("explorer-key").addEventListener("change", drawExplorer);
}
byId("sample-step")?.addEventListener("change", (event) => {
  byId("sample-list").replaceChildren(byId(`samples-${event.target.value}`).content.cloneNode(true));
});
for (const button of document.querySelectorAll("#signals button")) {
  button.addEventListener("click", () => {
    byId("sample-list").dataset.signal = button.value;
    for (const other of byId("signals").children) other.setAttribute("aria-pressed", String(other === button));
  });
}
// A new page may be there; not while the reader is at a control.
if (data.live) setInterval(() => { if (!document.hidden && !document.activeElement?.matches("select, input, button")) location.reload(); }, 10000);
start(() => { data.figures.forEach(draw); if (keys.length) drawExplorer(); });
