/* What runs logged over their steps, drawn below a chart on its compute axis: reward, entropy, length, anything.

   const below = scalerlBelow(element);   adds its controls and its plot to `element`
   below.fill(data);                      newer data; the choice stays
   below.draw(shown);                     shown: {lines: [{run, colour, faint}], axis, unit, log, range, palette, layout} */
"use strict";

function scalerlBelow(element, controls) {
  const { node, plain, amount, averaged, clock, names } = scalerlMarks;
  const SHARES = [0, 0.01, 0.03, 0.08, 0.2];  // of the values of a run that are averaged
  const select = node("select");
  const smooth = node("input", { type: "range", min: "0", max: String(SHARES.length - 1), value: "2" });
  const selectLabel = node("label", {}, "Below", select);
  const smoothLabel = node("label", { hidden: true }, "Smoothing", smooth);
  const plot = node("div", { class: "sc-below", hidden: true });
  let last = null;
  controls.append(selectLabel, smoothLabel);
  element.append(plot);

  /* Steps of a run as compute on the axis, along its evaluations, and on beyond them at the last rate. */
  function computes(run, { axis, unit }) {
    if (run.logged.compute && run.compute[axis]) return run.logged.compute.map((compute) => compute / unit.size);
    if (run.step.filter((step) => step !== null).length < 2 || !run.compute[axis]) return null;
    const at = clock(run.step, run.compute[axis]);
    return run.logged.step.map((step) => Math.max(at(step), 0) / unit.size);
  }

  function traces(shown) {
    return shown.lines.flatMap(({ run, colour, faint }) => {
      const values = run.logged.values[select.value];
      const x = values && computes(run, shown);
      if (!x) return [];
      const shared = { x, mode: "lines", connectgaps: true };
      const mean = averaged(values, SHARES[smooth.value]);
      const text = mean.map((value, i) => {
        const step = run.logged.step[i];
        const at = step === null ? `${amount(x[i])} ${plain(shown.unit.label)}` : `step ${amount(step)}`;
        return `${plain(names.of(run.name))}<br>${at}: ${plain(select.value)} ${value === null ? "–" : amount(value)}`;
      });
      const line = { ...shared, y: mean, text, hovertemplate: "%{text}<extra></extra>", opacity: faint ? 0.3 : 1,
        line: { color: colour, width: shown.lines.length > 12 ? 1 : 1.8 } };
      if (mean === values || shown.lines.length > 12) return [line];
      return [{ ...shared, y: values, hoverinfo: "skip", opacity: 0.25, line: { color: colour, width: 1 } }, line];
    });
  }

  function draw(shown = last) {
    last = shown;
    plot.hidden = smoothLabel.hidden = !select.value;
    if (!select.value) return;
    const { layout } = shown;
    const { range } = shown;
    Plotly.react(plot, traces(shown), { ...layout, shapes: [], annotations: [], height: 210, hovermode: "closest",
      margin: { ...layout.margin, t: 12 }, uirevision: select.value, dragmode: false,
      xaxis: { ...layout.xaxis, range, autorange: false, autorangeoptions: {}, fixedrange: true },
      yaxis: { gridcolor: layout.yaxis.gridcolor, linecolor: layout.yaxis.linecolor, zeroline: false, fixedrange: true, nticks: 5,
        title: layout.margin.l < 50 ? { text: "" } : { text: plain(words(select.value), 28), standoff: 10 } },
    }, { displayModeBar: false, responsive: true });
  }

  const words = (name) => name.replaceAll("_", " ");
  for (const [control, event] of [[select, "change"], [smooth, "input"]]) control.addEventListener(event, () => draw());
  return {
    draw,
    fill(data) {
      const before = select.value;
      select.replaceChildren(node("option", { value: "" }, "nothing"),
        ...data.metrics.map((name) => node("option", { value: name }, words(name))));
      select.value = data.metrics.includes(before) ? before : "";
      selectLabel.hidden = !data.metrics.length;
    },
  };
}
