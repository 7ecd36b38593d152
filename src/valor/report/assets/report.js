// Draws what the page's JSON describes. Text from models only ever goes through textContent.
(() => {
  const curve = (key) => {
    const [place, values] = data.metrics.curves[key];
    return { x: data.metrics.steps[place], y: values };
  };

  // ---- charts -------------------------------------------------------------------------------------------------
  // Running median, then mean, over a twentieth of the run around each step: no lag, and a spike stays out of the trend.
  const running = (values, reach, summary) => values.map((value, i) => {
    if (value === null) return null;
    return summary(values.slice(Math.max(0, i - reach), i + reach + 1).filter((one) => one !== null));
  });
  const median = (numbers) => numbers.sort((a, b) => a - b)[numbers.length >> 1];
  const mean = (numbers) => numbers.reduce((sum, one) => sum + one, 0) / numbers.length;
  const smooth = (values) => {
    const reach = Math.max(2, Math.round(values.length / 40));
    return running(running(values, reach, median), reach, mean);
  };

  const tracesOf = (panel, line) => {
    const { x, y } = curve(line.key);
    const stroke = color(`c${((line.color - 1) % 12) + 1}`);
    const hover = { name: line.label, hovertemplate: panel.unit === "%" ? "%{y:.1%}" : "%{y:.4~g}" };
    const dash = line.style === "dash" ? "5px,4px" : "solid";
    const few = panel.markers || y.length < 3;
    if (few || !panel.smooth || y.length < 40) {
      const opacity = line.style === "faint" ? 0.45 : 1;
      const mode = few ? "lines+markers" : "lines";
      return [{ ...hover, x, y, mode, opacity, line: { color: stroke, width: 2, dash }, marker: { size: 6, color: stroke } }];
    }
    const opacity = { faint: 0.5, dash: 0.2 }[line.style] || 0.32;
    const raw = { ...hover, x, y, mode: "lines", opacity, line: { color: stroke, width: 1.2 } };
    if (line.style === "faint") return [raw];
    return [raw, { x, y: smooth(y), mode: "lines", hoverinfo: "skip", line: { color: stroke, width: 2.2, dash } }];
  };

  const yAxis = (panel, lines) => {
    const values = lines.flatMap((line) => curve(line.key).y).filter((value) => value !== null);
    const y = axis();
    if (new Set(values).size === 1) y.range = [Math.min(0, 1.1 * values[0]), Math.max(0, 1.1 * values[0]) || 1]; // not an axis around one number
    if (panel.unit === "%") y.tickformat = Math.max(...values) < 0.05 ? ".1%" : ".0%";
    if (panel.log && values.some((value) => value > 0)) return { ...y, type: "log", dtick: 1, nticks: undefined };
    if (panel.bounds) {
      const [low, high] = panel.bounds;
      const least = Math.min(...values, ...panel.levels);
      y.range = [least < low ? low : least - 0.05, Math.max(high, Math.min(Math.max(...values), high))];
    }
    return y;
  };

  const drawPanel = (panel) => {
    const layout = base();
    layout.yaxis = yAxis(panel, panel.lines);
    const steps = panel.lines.flatMap((line) => curve(line.key).x);
    const [first, last] = [Math.min(...steps), Math.max(...steps)];
    if (last - first <= 6) layout.xaxis.dtick = 1; // no step 1.2
    if (last === first) layout.xaxis.range = [first - 0.6, last + 0.6];
    layout.shapes = panel.levels.map((at) => ({ ...guide(0, at, 1, at), xref: "paper" }));
    Plotly.react(`plot-${panel.id}`, panel.lines.flatMap((line) => tracesOf(panel, line)), layout, options);
    legend(byId(`panel-${panel.id}`).querySelector(".legend"), panel.lines.map((line) => (
      { label: line.label, value: line.last, stroke: color(`c${((line.color - 1) % 12) + 1}`), shape: line.style })));
  };

  const percent = (share) => (share < 0.001 ? "<0.1%" : `${(100 * share).toFixed(share < 0.01 ? 1 : 0)}%`);
  const drawTiming = ({ bars, phases }) => {
    const layout = base();
    Object.assign(layout, { barmode: "stack", barnorm: "percent", bargap: bars.length > 60 ? 0 : 0.12, hovermode: "closest" });
    layout.xaxis = { ...layout.xaxis, type: "category", showgrid: false, nticks: innerWidth < 720 ? 5 : 12, tickangle: 0 };
    layout.yaxis = { ...layout.yaxis, ticksuffix: "%", range: [0, 100] };
    const stroke = (place) => color(phases[place].label === "other" ? "c12" : `c${(place % 11) + 1}`);
    Plotly.react("plot-timing", phases.map((phase, place) => ({
      type: "bar", x: bars, y: phase.seconds, customdata: phase.seconds, marker: { color: stroke(place), opacity: 0.86, line: { width: 0 } },
      name: phase.label, hovertemplate: `step %{x}<br>${phase.label}: %{customdata:.3~g} s, %{y:.0f}%<extra></extra>`,
    })), layout, options);
    const sums = phases.map((phase) => phase.seconds.reduce((sum, value) => sum + value, 0));
    const whole = sums.reduce((sum, value) => sum + value, 0);
    legend(byId("panel-timing").querySelector(".legend"), phases.map((phase, place) => (
      { label: phase.label, value: percent(sums[place] / whole), stroke: stroke(place), shape: "box" })));
  };

  const drawSpread = ({ id, steps, rows, shares }) => {
    const layout = base();
    Object.assign(layout, { hovermode: "closest" });
    layout.xaxis = { ...layout.xaxis, showgrid: false };
    layout.yaxis = { ...layout.yaxis, showgrid: false };
    if (steps.length === 1) Object.assign(layout.xaxis, { range: [steps[0] - 0.6, steps[0] + 0.6], dtick: 1 });
    // The root lets a thin tail be seen beside a peak.
    const z = shares.map((row) => row.map(Math.sqrt));
    Plotly.react(`plot-${id}`, [{
      type: "heatmap", x: steps, y: rows, z, customdata: shares, zmin: 0, showscale: false,
      colorscale: [[0, `${color("c1")}00`], [1, color("c1")]],
      hovertemplate: "step %{x}, around %{y:.3~g}: %{customdata:.1%}<extra></extra>",
    }], layout, options);
  };

  const drawExplorer = () => {
    const key = byId("explorer-key").value;
    const last = number(curve(key).y.filter((value) => value !== null).at(-1));
    const line = { label: key, key, last, style: "solid", color: 1 };
    drawPanel({ id: "explorer", unit: "", log: false, bounds: null, levels: [], markers: false, smooth: true, lines: [line] });
  };

  // ---- samples ------------------------------------------------------------------------------------------------
  const SIGNALS = [
    { id: "advantages", label: "Advantage", paint: "diverging" },
    { id: "values", label: "Value", paint: "worth" },
    { id: "log_probs", label: "Surprise", paint: "surprise" },
  ].filter(({ id }) => data.samples.some((group) => group.records.some((record) => record[id])));
  let signal = SIGNALS[0] || { id: "", paint: "none" };

  // The ends of all values and of the rewards beside them: one scale for the run, or noise would fill every strip.
  const VALUES = data.samples.flatMap((group) => group.records).filter((record) => record.values)
    .flatMap((record) => [...record.values, record.reward]).filter((value) => value !== null && value !== undefined)
    .reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  // The signal's ends over one step's samples, so that their colours compare; null where it was not recorded.
  const range = (group) => {
    const numbers = group.records.flatMap((record) => record[signal.id] || []).filter((value) => value !== null).sort((a, b) => a - b);
    if (!numbers.length) return null;
    if (signal.paint === "worth") return VALUES;
    // The widest two in a hundred share the deepest colour, or one outlier would leave the rest blank.
    const sizes = numbers.map(Math.abs).sort((a, b) => a - b);
    const most = sizes[Math.floor(0.98 * (sizes.length - 1))] || 1;
    return signal.paint === "surprise" ? [0, most] : [-most, most];
  };
  const wash = (name, share) => `color-mix(in srgb, var(--${name}) ${Math.round(58 * Math.max(0, Math.min(1, share)))}%, transparent)`;
  const background = (value, limits) => {
    if (value === null || value === undefined || !limits) return "";
    const [low, high] = limits;
    if (signal.paint === "diverging") return wash(value < 0 ? "bad" : "good", Math.abs(value) / high);
    if (signal.paint === "surprise") return wash("surprise", -value / high);
    return wash("worth", (value - low) / (high - low || 1));
  };

  const tokenText = (token) => token.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
  const tokenSpan = (record, place, limits) => {
    const own = !record.mask || record.mask[place];
    const span = element("span", own ? "" : "other", tokenText(record.tokens[place]));
    span.dataset.place = place;
    if (own) span.style.background = background(record[signal.id]?.[place], limits);
    return span;
  };
  const folded = (title, body, open) => {
    const made = element("details");
    made.open = open;
    made.append(element("summary", "", title), body);
    return made;
  };

  // ---- an episode as a conversation -----------------------------------------------------------------------------
  const callCard = (call) => {
    const card = element("div", call.error ? "call failed" : "call");
    const asked = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments);
    const spent = call.seconds < 1 ? `${(1000 * call.seconds).toFixed(call.seconds < 0.01 ? 1 : 0)} ms` : `${short(call.seconds)} s`;
    const facts = [spent, ...(call.reward ? [`reward ${short(call.reward)}`] : []), ...(call.error ? [`error: ${call.error}`] : [])];
    card.append(element("code", "", `${call.name ?? "no call"}(${asked})`), element("small", "", facts.join(" · ")));
    card.append(folded("Result", element("pre", "", call.text), call.text.length <= 300));
    return card;
  };
  const conversation = (record, limits) => {
    const { calls, turn_rewards: rewards, rows } = record.episode;
    const box = element("div", "conversation");
    let spoken = 0; // the last turn of the policy so far
    for (let start = 0, end; start < record.tokens.length; start = end) {
      const turn = record.turns[start];
      const row = rows.findIndex(({ at }) => at === start);
      for (end = start + 1; end < record.tokens.length && record.turns[end] === turn && !rows.some(({ at }) => at === end);) end += 1;
      if (row >= 0) box.append(folded(`Row ${row + 2}: the chat template has rewritten what came before`, element("pre", "", rows[row].prompt), false));
      const tokens = element("div", "tokens");
      for (let place = start; place < end; place += 1) tokens.append(tokenSpan(record, place, limits));
      const bubble = element("div", turn ? "bubble" : "bubble told");
      if (turn) {
        const reward = rewards[turn - 1] ? ` · reward ${short(rewards[turn - 1])}` : "";
        bubble.append(element("small", "", turn === spoken ? "policy, goes on" : `policy, turn ${turn}${reward}`), tokens);
        box.append(bubble, ...calls.filter((call) => call.turn === turn && turn !== spoken).map(callCard));
        spoken = turn;
      } else {
        const answered = calls.some((call) => call.turn === spoken);
        const who = answered ? "tool" : "environment";
        bubble.append(folded(`${who}, ${end - start} tokens as the policy reads them`, tokens, !answered && end - start <= 200));
        box.append(bubble);
      }
    }
    return box;
  };

  const ENDS = { stop: "itself", length: "the limit on tokens", turns: "the limit on turns", abort: "an error" };
  const sampleCard = (record, limits) => {
    const card = element("article", "sample");
    const head = element("header");
    const fact = (label, value, className) => {
      if (value === null || value === undefined || value === "") return;
      const item = element("span", className, `${label} `);
      item.append(element("b", "", typeof value === "object" ? JSON.stringify(value) : String(value)));
      head.append(item);
    };
    fact("reward", number(record.reward));
    fact("expected", record.ground_truth, "truth");
    fact("ended by", ENDS[record.finish_reason] ?? record.finish_reason);
    fact("tokens", record.tokens.length + (record.tokens_left_out || 0));
    if (record.episode) {
      fact("turns", record.episode.turn_rewards.length);
      fact("tool calls", record.episode.calls.length);
      fact("tool errors", record.episode.calls.filter((call) => call.error).length || "");
      fact("environment's outcome", record.episode.outcome);
      fact("could not be played", record.episode.error);
    }
    fact("", record.data_source);
    Object.entries(record.reward_info || {}).forEach(([name, value]) => fact(name, typeof value === "number" ? number(value) : value));
    const prompt = folded("Prompt", element("pre", "", record.prompt), record.prompt.length <= 600);
    const tokens = record.episode ? conversation(record, limits) : element("div", "tokens");
    if (!record.episode) tokens.append(...record.tokens.map((_, place) => tokenSpan(record, place, limits)));
    if (record.tokens_left_out) tokens.append(element("span", "cut", ` … and ${record.tokens_left_out} more tokens`));
    card.append(head, prompt, tokens);
    listen(tokens, record);
    return card;
  };

  const tip = element("div");
  tip.id = "tip";
  tip.setAttribute("role", "tooltip");
  document.body.append(tip);
  let marked = null;

  const hideTip = () => {
    tip.style.display = "none";
    marked?.classList.remove("on");
    marked = null;
  };
  const placeTip = (span) => {
    const at = span.getClientRects()[0] || span.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - tip.offsetWidth - 8));
    const above = at.top - tip.offsetHeight - 8;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 50 ? above : at.bottom + 8}px`;
  };
  const showTip = (span, record) => {
    hideTip();
    const place = Number(span.dataset.place);
    const rows = element("dl");
    const row = (label, values, show = number) => {
      if (values && values[place] !== null) rows.append(element("dt", "", label), element("dd", "", show(values[place])));
    };
    row("advantage", record.advantages);
    row("value", record.values);
    row("return", record.returns);
    row("log-prob", record.log_probs);
    row("probability", record.log_probs, (value) => number(Math.exp(value), "%"));
    const name = element("div", "", `token ${place + 1}: `);
    name.append(element("code", "", JSON.stringify(record.tokens[place])));
    if (record.mask && !record.mask[place]) name.append(" (not written by the policy)");
    tip.replaceChildren(name, rows);
    tip.style.display = "block";
    placeTip(span);
    span.classList.add("on");
    span.setAttribute("aria-describedby", "tip");
    marked = span;
  };
  const listen = (tokens, record) => {
    const show = (event) => {
      const span = event.target.closest("span[data-place]");
      if (span) showTip(span, record); else hideTip();
    };
    tokens.addEventListener("mouseover", show);
    tokens.addEventListener("click", show);
    tokens.addEventListener("mouseleave", hideTip);
    // One stop of the Tab key; arrows, Home and End go from token to token.
    const spans = [...tokens.querySelectorAll("span[data-place]")];
    if (!spans.length) return;
    spans.forEach((span) => span.setAttribute("tabindex", "-1"));
    spans[0].setAttribute("tabindex", "0");
    tokens.setAttribute("role", "group");
    tokens.setAttribute("aria-label", "tokens, from one to the next with the arrow keys");
    tokens.addEventListener("keydown", (event) => {
      const at = spans.indexOf(document.activeElement);
      const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: spans.length - 1 }[event.key];
      if (event.key === "Escape") hideTip();
      if (at < 0 || !spans[next]) return;
      event.preventDefault();
      for (let folded = spans[next].closest("details"); folded && tokens.contains(folded); folded = folded.parentElement.closest("details")) folded.open = true;
      spans[at].setAttribute("tabindex", "-1");
      spans[next].setAttribute("tabindex", "0");
      spans[next].focus();
    });
    tokens.addEventListener("focusin", show);
    tokens.addEventListener("focusout", hideTip);
  };

  const drawScale = (limits) => {
    if (!limits) return byId("scale").replaceChildren(signal.id ? "not recorded for these samples" : "");
    const [low, high] = limits;
    const ends = signal.paint === "surprise" ? ["certain", `log-prob ${short(-high)}`] : [short(low), short(high)];
    const bar = element("i");
    const stops = signal.paint === "diverging" ? [wash("bad", 1), "transparent", wash("good", 1)] : ["transparent", wash(signal.paint, 1)];
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    return byId("scale").replaceChildren(ends[0], bar, ends[1]);
  };

  const drawSamples = () => {
    hideTip();
    const group = data.samples[Number(byId("sample-step").value)];
    const limits = range(group);
    drawScale(limits);
    byId("sample-note").textContent = group.available > group.records.length
      ? `The first ${group.records.length} of the ${group.available} that the run recorded at this step.` : "";
    byId("sample-list").replaceChildren(...group.records.map((record) => sampleCard(record, limits)));
  };

  const drawSignals = () => {
    byId("signals").replaceChildren(...SIGNALS.map((one) => {
      const button = element("button", "", one.label);
      button.type = "button";
      button.setAttribute("aria-pressed", String(one === signal));
      button.addEventListener("click", () => { signal = one; drawSignals(); drawSamples(); });
      return button;
    }));
  };

  // ---- start --------------------------------------------------------------------------------------------------
  const drawCharts = () => {
    data.panels.forEach(drawPanel);
    data.spreads.forEach(drawSpread);
    if (data.timing) drawTiming(data.timing);
    drawExplorer();
  };

  const drawn = new Set(data.panels.flatMap((panel) => panel.lines.map((line) => line.key)));
  const keys = Object.keys(data.metrics.curves);
  byId("explorer-key").replaceChildren(...keys.map((key) => element("option", "", key)));
  byId("explorer-key").value = keys.find((key) => !drawn.has(key) && !/^(timing_|training\/global_step)/.test(key)) || keys[0];
  byId("explorer-key").addEventListener("change", drawExplorer);
  byId("config-filter")?.addEventListener("input", (event) => {
    const words = event.target.value.toLowerCase().split(/\s+/);
    for (const row of byId("config-table").rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
  });
  if (data.samples.length) {
    byId("sample-step").value = String(data.opening);
    byId("sample-step").addEventListener("change", drawSamples);
    // A token that the keyboard has reached scrolls into view, and keeps its tip.
    addEventListener("scroll", () => (marked === document.activeElement ? placeTip(marked) : hideTip()), { passive: true });
    drawSignals();
    drawSamples();
  }
  // A new page may be there; not while the reader is at a control or a token.
  if (data.live) setInterval(() => { if (!document.hidden && !marked && !document.activeElement?.matches("select, input")) location.reload(); }, 10000);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);
  drawCharts();
  document.documentElement.dataset.ready = "yes";
})();
