/* Runs laid over one another: evaluations, fitted curves with their bands, and forecasts as they were frozen.

   What has one colour, one sign and one line of the legend is an entry: a run, or a group of runs with its mean
   curve, {name, runs, fit, reason, task}; a task of a run is thin, and takes nothing from what the run has alone.

   const chart = scalerlChart(element, data, label);   draws into `element`; needs Plotly, marks.js, below.js, and chart.css
   chart.update(data);                                 draws newer data; axis, zoom and choice of runs stay

   data     what `scalerl.view.runs.overlay.overlay` returns
   label    what a screen reader says

   After every drawing `element.dataset.drawn` is "AXIS linear" or "AXIS log". */
"use strict";

var scalerlChart = (() => {
  const { LIGHT, MOST_APART, names, matches, known, colours, plain, rate, amount, clock, node, faded, look } = scalerlMarks;
  const { clear, frameOf, level, upright, drawnAnew } = scalerlMarks;
  const MOST_BANDS = 6;
  const MOST_LABELS = 14;
  const MOST_LABEL = 156;  // width of a label, in pixels
  const pen = document.createElement("canvas").getContext("2d");
  const FILTERED = 8;  // runs from which on there is a filter

  return function scalerlChart(element, data, label = "Pass rate against compute") {
    const state = { by: "", asked: "", filter: "", near: null, at: null, hidden: new Set(), picked: new Map(), names: "" };
    let entries = [];
    const select = node("select");
    const log = node("button", { type: "button" }, "Logarithmic");
    const by = node("select");
    const byLabel = node("label", {}, "Colour by", by);
    const filter = node("input", { type: "search", placeholder: "Find a run, or lr=0.001", "aria-label": "Find a run" });
    const whole = node("button", { type: "button" }, "Whole view");
    const controls = node("div", { class: "sc-controls" }, node("label", {}, "Compute", select), log, byLabel, whole, filter);
    const labels = node("div", { class: "sc-labels", "aria-hidden": "true" });
    const plot = node("div", { class: "sc-plot", tabindex: "0", role: "group", "aria-label":
      label + ". Arrow keys go from evaluation to evaluation." });
    const said = node("p", { class: "sc-said", "aria-live": "polite" });
    const legend = node("fieldset", { class: "sc-legend" });
    const note = node("p", { class: "sc-note" });
    const frame = node("div", { class: "sc-frame" }, plot, labels);
    element.replaceChildren(controls, frame, said, legend, note);
    const below = scalerlBelow(frame, controls);
    let waiting = false;

    // What of the data is on this axis, and looks like what

    const many = () => entries.length > MOST_APART;
    const unit = () => data.axes.find((axis) => axis.key === state.axis);
    const has = (run) => state.axis in run.compute;
    const grey = (entry) => many() && !state.picked.has(entry.name) && state.near !== entry.name;
    const passes = (run) => !state.filter || matches(run, state.filter);

    /* The entries, whatever is hidden of them. */
    function grouped() {
      const runs = new Map(data.runs.map((run) => [run.name, run]));
      const grouping = data.groupings.find((one) => one.by === state.by);
      if (!grouping) return data.runs.map((run) => ({ name: run.name, runs: [run], fit: run.fit, reason: run.reason, task: run.task }));
      return grouping.groups.map((group) => {
        const own = group.runs.map((name) => runs.get(name));
        return { name: group.name, runs: own, fit: own.length > 1 ? group.fit : own[0].fit, reason: own.length > 1 ? "" : own[0].reason };
      });
    }

    /* Those that are drawn, with the runs that are; a mean curve is that of all its runs, or is not drawn. */
    function shown() {
      return entries.filter((entry) => !state.hidden.has(entry.name)).flatMap((entry) => {
        const runs = entry.runs.filter((run) => has(run) && passes(run));
        return runs.length ? [{ ...entry, runs, fit: runs.length === entry.runs.length ? entry.fit : null }] : [];
      });
    }

    function lookOf(entry) {
      if (!many()) return look(entries.findIndex((one) => one.name === entry.name));
      return look(state.picked.has(entry.name) ? state.picked.get(entry.name) : freeLook());
    }

    function freeLook() {
      const taken = new Set(state.picked.values());
      let place = 0;
      while (taken.has(place)) place += 1;
      return place;
    }

    /* Rows of (shown compute, ...columns) where the compute, on the axis that is shown, has a place on it. */
    function rows(compute, ...columns) {
      const size = unit().size;
      const found = [];
      compute.forEach((value, i) => {
        if (value !== null && (value > 0 || !state.log)) found.push([value / size, ...columns.map((column) => column[i])]);
      });
      return found;
    }

    const evaluated = (run, ...columns) => rows(run.compute[state.axis] || [], run.pass_rate, ...columns);

    /* From compute on an axis to that on the one that is shown, along the mean clock of runs. */
    function along(runs, from = data.axis) {
      if (from === state.axis) return (value) => value;
      const clocks = runs.map((run) => clock(run.compute[from] || [], run.compute[state.axis] || []));
      return (value) => {
        const found = value === null ? [null] : clocks.map((one) => one(value));
        return found.includes(null) ? null : found.reduce((sum, one) => sum + one, 0) / found.length;
      };
    }

    const curveRows = (runs, curve, ...columns) => rows(curve.compute.map(along(runs)), curve.line, ...columns);

    function leading(run) {
      return run.forecasts.find((forecast) => forecast.leads);
    }

    const curveOf = ({ fit }) => fit && fit.curve;

    /* Compute up to which the drawn curve knew the runs, and from where; null where nothing is drawn. */
    function windowOf({ runs, fit }) {
      const ends = fit && fit.window.map(along(runs));
      return ends && known(ends[1]) ? ends.map((end) => end / unit().size) : null;
    }

    // Traces

    const single = (run) => ({ name: run.name, runs: [run], fit: run.fit });
    const x = (found) => found.map((row) => row[0]);
    const y = (found) => found.map((row) => row[1]);

    function curveTraces(entry, colour, bands) {
      const curve = curveOf(entry);
      const found = curve ? curveRows(entry.runs, curve, curve.low, curve.high) : [];
      if (!found.length) return [];
      const { dash } = lookOf(entry);
      const dim = dimmed(entry);
      const traces = [];
      if (bands) {
        const back = [...found].reverse();
        traces.push({ x: x([...found, ...back]), y: [...found.map((row) => row[3]), ...back.map((row) => row[2])],
          fill: "toself", fillcolor: faded(colour, dim ? 0.04 : 0.15), mode: "none", hoverinfo: "skip" });
      }
      const end = (windowOf(entry) || [0, Infinity])[1] * (1 + 1e-6);
      const within = found.filter((row) => row[0] <= end);
      const beyond = found.filter((row) => row[0] > end);
      const line = (part, width) => ({ x: x(part), y: y(part), mode: "lines",
        line: { color: colour, dash, width }, opacity: dim ? 0.3 : 1, hoverinfo: "skip" });
      traces.push(line(within, state.near === entry.name ? 3.2 : entry.task ? 1.2 : entry.runs.length > 1 ? 2.6 : 2));
      if (beyond.length) traces.push(line([...within.slice(-1), ...beyond], 1));
      return traces;
    }

    function dimmed(entry) {
      return state.near !== null && state.near !== entry.name && !grey(entry);
    }

    function pointTrace(entry, colour, bars) {
      const [run] = entry.runs;
      const found = evaluated(run, run.noise, run.step, run.used);
      const { symbol } = lookOf(entry);
      const size = entry.task || found.length > 300 ? 4 : found.length > 100 ? 5 : 6.5;
      return { x: x(found), y: y(found), mode: "markers", meta: { run: run.name },
        opacity: dimmed(entry) ? 0.25 : 1,
        marker: { color: colour, size, symbol: found.map((row) => symbol + (!run.fit || row[4] ? "" : "-open")) },
        error_y: { visible: bars && found.length <= 300 && found.some((row) => row[2] !== null), type: "data",
          array: found.map((row) => row[2] || 0), color: colour, thickness: 1, width: 0 },
        text: found.map((row) => hover(run, row)), hovertemplate: "%{text}<extra></extra>" };
    }

    function hover(run, [compute, pass, noise, step]) {
      return `${plain(names.of(run.name))}<br>` + (step === null ? "" : `step ${amount(step)}, `) +
        `${amount(compute)} ${plain(unit().label)}<br>pass rate ${rate(pass)}` +
        (noise ? ` ± ${rate(noise)}` : "");
    }

    /* Forecasts as they were frozen: the one that leads, and of a run alone all, each a little before the next. */
    function forecastTraces(entry, colour) {
      const [run] = entry.runs;
      const own = isAlone(entry) ? run.forecasts : run.forecasts.filter((forecast) => forecast.leads);
      return own.flatMap((forecast, n) => forecastTrace(entry, forecast, colour, own.length - 1 - n));
    }

    function forecastTrace(entry, lead, colour, before) {
      const place = lead.interval && along(entry.runs, lead.axis)(lead.target) * (1 - 0.012 * before);
      if (!place) return [];
      const middle = (lead.interval[0] + lead.interval[1]) / 2;
      const text = `${plain(names.of(entry.runs[0].name))}<br>frozen at ${lead.step === null ? "an unknown step" : "step " + amount(lead.step)}: ` +
        `${rate(lead.median)} [${rate(lead.interval[0])}, ${rate(lead.interval[1])}]<br>` +
        (lead.measured === null ? "not measured yet" : `measured ${rate(lead.measured)}: ${lead.outcome}`);
      return [{ x: [place / unit().size], y: [middle], mode: "markers", opacity: dimmed(entry) ? 0.25 : 1,
        marker: { color: colour, symbol: "line-ew-open", size: 9, line: { width: 1.5, color: colour } },
        error_y: { type: "data", array: [middle - lead.interval[0]], color: colour, thickness: lead.leads ? 2 : 1, width: 7 },
        text: [text], hovertemplate: "%{text}<extra></extra>" }];
    }

    /* Many runs in two traces, as a trace for each would take seconds: thin curves, and evaluations. */
    function thinTraces(runs, colour, symbol, opacity, measured) {
      const line = { x: [], y: [], mode: "lines", line: { color: colour, width: 1 }, opacity, hoverinfo: "skip" };
      const dots = { x: [], y: [], text: [], mode: "markers", meta: { names: [] }, opacity,
        marker: { color: colour, symbol, size: runs.length > 8 ? 3.5 : 4.5 }, hovertemplate: "%{text}<extra></extra>" };
      for (const run of runs) {
        const curve = curveOf(single(run));
        const drawn = measured || !curve ? evaluated(run) : curveRows([run], curve);
        line.x.push(...x(drawn), null);
        line.y.push(...y(drawn), null);
        for (const row of evaluated(run, run.noise, run.step)) {
          dots.x.push(row[0]);
          dots.y.push(row[1]);
          dots.text.push(hover(run, row));
          dots.meta.names.push(run.name);
        }
      }
      return [line, dots];
    }

    function traces(palette) {
      const drawn = shown();
      const plainRuns = drawn.filter(grey).flatMap((entry) => entry.runs);
      const coloured = drawn.filter((entry) => !grey(entry));
      const found = plainRuns.length ? thinTraces(plainRuns, palette.muted, "circle", 0.45, false) : [];
      const few = coloured.filter((entry) => !entry.task).length <= MOST_BANDS;
      const full = (entry) => state.near === entry.name || (few && !entry.task);
      for (const entry of coloured) {
        found.push(...curveTraces(entry, palette[lookOf(entry).colour], full(entry)));
      }
      for (const entry of coloured) {
        const { colour, symbol } = lookOf(entry);
        if (entry.runs.length > 1) {
          // Seeds as they were measured beside their mean curve; without one, by their own curves.
          found.push(...thinTraces(entry.runs, palette[colour], symbol, dimmed(entry) ? 0.12 : 0.4, Boolean(curveOf(entry))));
          continue;
        }
        if (isAlone(entry)) found.push(...frozenTrace(entry.runs[0], palette));
        found.push(pointTrace(entry, palette[colour], full(entry)), ...forecastTraces(entry, palette[colour]));
      }
      return found;
    }

    /* Of a run alone, the curve that the leading forecast was made with, from where it was made on. */
    function frozenTrace(run, palette) {
      const lead = leading(run);
      if (!lead || !lead.curve) return [];
      const at = along([run], lead.axis);
      const found = rows(lead.curve.compute.map(at), lead.curve.line).filter((row) => row[0] >= at(lead.made) / unit().size);
      return [{ x: x(found), y: y(found), mode: "lines", hoverinfo: "skip",
        line: { color: palette.later, width: 1.5, dash: "dash" } }];
    }

    // Layout

    /* The entry that stands out: the only one, its tasks apart, or the one that is pointed at. */
    function alone() {
      const coloured = shown().filter((entry) => !grey(entry));
      const runs = coloured.filter((entry) => !entry.task);
      const [only, another] = runs.length ? runs : coloured;
      return coloured.find((entry) => entry.name === state.near) || (another ? null : only || null);
    }

    function isAlone(entry) {
      const only = alone();
      return only !== null && only.name === entry.name;
    }

    function shapes(palette) {
      const only = alone();
      const ends = only && windowOf(only);
      const fitted = !ends ? [] : [{ type: "rect", xref: "x", yref: "paper", x0: Math.max(ends[0], state.log ? lowest() : 0), x1: ends[1],
        y0: 0, y1: 1, fillcolor: palette.window, line: { width: 0 }, layer: "below" }];
      const lines = [
        ...(only ? [[level, knownCeiling(only), "muted", "dot"], [level, only.fit?.A?.[0], "ceiling", "dash"], [upright, changeOf(only), "later", "dash"]] : []),
        [upright, budgetAt(), "muted", "dot"], [level, data.target, "muted", "dot"],
      ].filter(([, at]) => known(at));
      return [...fitted, ...ceilingBars(palette),
        ...lines.map(([line, at, colour, dash]) => line(at, { color: palette[colour], width: 1.2, dash }))];
    }

    /* Intervals of A as bars at the right edge. */
    function ceilingBars(palette) {
      const fitted = shown().filter((entry) => !grey(entry) && entry.fit && entry.fit.A && (!entry.task || state.near === entry.name)).slice(0, MOST_BANDS);
      return fitted.map(({ name, fit }, n) => ({ type: "rect", xref: "paper", yref: "y", x0: 0.993 - 0.012 * n, x1: 1 - 0.012 * n,
        y0: Math.max(fit.A[1], 0), y1: Math.min(fit.A[2], 1), line: { width: 0 }, opacity: fit.identified ? 0.55 : 0.25,
        fillcolor: palette[fitted.length > 1 ? lookOf({ name }).colour : "ceiling"] }));
    }

    /* At the left end of a line, above or below it. */
    const beside = (below) => ({ xref: "paper", x: 0, xanchor: "left", yanchor: below ? "top" : "bottom", yshift: below ? -2 : 2 });
    const knownCeiling = (entry) => (entry.runs.length === 1 ? entry.runs[0].known : null);
    const changeOf = ({ runs, fit }) => shownAt(runs, fit ? fit.change : null);

    function ceilingNotes(palette, look) {
      const only = alone();
      if (!only || !only.fit) return [];
      const { A, identified, misfit } = only.fit;
      const found = [];
      // At the left, where the curve is far below it, and off the lines and texts of a target or a known ceiling.
      const [nearest] = [data.target, knownCeiling(only)].filter(known).sort((a, b) => Math.abs(a - A?.[0]) - Math.abs(b - A?.[0]));
      const below = nearest > A?.[0];
      if (A) found.push({ ...look, bgcolor: clear, ...beside(below), y: A[0], font: { color: palette.ceiling, size: 12 },
        text: "ceiling A" + (plot.clientWidth < 560 ? "" : ` ${rate(A[0])} [${rate(A[1])}, ${rate(A[2])}]`) + (identified ? "" : ", not identified") });
      const at = changeOf(only);
      if (known(at)) found.push({ ...look, xref: "x", yref: "paper", y: 0.02, yanchor: "bottom", xanchor: "left",
        x: state.log ? Math.log10(at) : at, text: plain(misfit), font: { color: palette.later, size: 12 } });
      return found;
    }

    /* Compute on the axis of the fits as it is shown, along the mean clock of runs. */
    function shownAt(runs, compute) {
      const at = along(runs)(compute);
      return known(at) ? at / unit().size : null;
    }

    const ofAll = (compute) => shownAt(data.runs.filter(has), compute);
    const budgetAt = () => ofAll(data.budget);

    function annotations(palette) {
      const look = { showarrow: false, font: { color: palette.muted, size: 12 }, bgcolor: faded(palette.paper, 0.75), borderpad: 1 };
      const budget = budgetAt();
      const found = [];
      if (budget !== null) {
        found.push({ ...look, text: "budget", xref: "x", yref: "paper", xanchor: "right", yanchor: "top", y: 1, x: state.log ? Math.log10(budget) : budget });
      }
      if (data.target !== null) {
        found.push({ ...look, bgcolor: clear, ...beside(alone()?.fit?.A?.[0] >= data.target), y: data.target, text: `target ${rate(data.target)}` });
      }
      return [...found, ...ceilingNotes(palette, look)];
    }

    function lowest() {
      let least = Infinity;
      for (const { runs } of shown()) for (const run of runs) for (const [at] of evaluated(run)) if (at < least) least = at;
      return least / 2;
    }

    function layout(palette) {
      const narrow = plot.clientWidth < 560;
      const axis = { gridcolor: palette.grid, linecolor: palette.muted, zeroline: false, tickcolor: palette.grid };
      return { ...frameOf(palette), hovermode: "closest",
        modebar: { bgcolor: clear, color: palette.muted, activecolor: palette.ink },
        margin: { l: narrow ? 40 : 58, r: labelWidth(), t: 32, b: 46 }, uirevision: `${state.axis} ${state.log}`,
        dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", shapes: shapes(palette), annotations: annotations(palette),
        xaxis: { ...axis, type: state.log ? "log" : "linear", rangemode: "tozero", autorangeoptions: included(), exponentformat: "SI", nticks: narrow ? 5 : 10,
          title: { text: `training compute (${plain(unit().label)})`, standoff: 8 } },
        yaxis: { ...axis, tickformat: ".2f", autorangeoptions: { clipmin: -0.03, clipmax: 1.03 },
          title: narrow ? { text: "" } : { text: "pass rate on the held-out prompts", standoff: 10 } } };
    }

    // Names at the ends of lines, as far as there is room for them

    function labelled() {
      const coloured = shown().filter((entry) => !grey(entry));
      return plot.clientWidth >= 560 && coloured.length > 1 && coloured.length <= MOST_LABELS ? coloured : [];
    }

    /* The names of labels by entry, without what all begin with where that makes them too long. */
    function labelTexts() {
      const whole = labelled().map((entry) => names.of(entry.name));
      let texts = whole;
      if (Math.max(0, ...whole.map(textWidth)) > MOST_LABEL) {
        const differs = [...whole[0]].findIndex((letter, n) => whole.some((name) => name[n] !== letter));
        const same = whole[0].slice(0, differs < 0 ? whole[0].length : differs).search(/[^-_/.,= ]*$/);
        if (same > 2) texts = whole.map((name) => `…${name.slice(same)}`);
      }
      return new Map(labelled().map((entry, n) => [entry.name, texts[n]]));
    }

    function textWidth(text) {
      pen.font = `600 12.5px ${getComputedStyle(document.body).fontFamily}`;
      return Math.ceil(pen.measureText(text).width);
    }

    function labelWidth() {
      const longest = Math.max(0, ...[...labelTexts().values()].map(textWidth));
      return longest ? Math.min(longest, MOST_LABEL) + 14 : 14;
    }

    /* Where the line of an entry leaves the frame: its curve, or its last evaluations. */
    function endOf(entry, last) {
      const curve = curveOf(entry);
      const lines = curve ? [curveRows(entry.runs, curve)] : entry.runs.map((run) => evaluated(run));
      const ends = lines.map((line) => line.filter((row) => row[0] <= last).at(-1)).filter(Boolean);
      return ends.length ? ends.reduce((sum, row) => sum + row[1], 0) / ends.length : null;
    }

    function placeLabels() {
      const { xaxis, yaxis } = plot._fullLayout;
      const last = (state.log ? 10 ** xaxis.range[1] : xaxis.range[1]) * (1 + 1e-9);
      const found = labelled().map((entry) => [entry, endOf(entry, last)]).filter(([, end]) => end !== null)
        .map(([entry, end]) => ({ entry, top: Math.min(Math.max(yaxis.l2p(end), 0), yaxis._length) })).sort((a, b) => a.top - b.top);
      found.forEach((one, n) => { if (n) one.top = Math.max(one.top, found[n - 1].top + 15); });
      for (let n = found.length - 1; n >= 0; n -= 1) {
        found[n].top = Math.min(found[n].top, n < found.length - 1 ? found[n + 1].top - 15 : yaxis._length);
      }
      const texts = labelTexts();
      labels.replaceChildren(...found.map(({ entry, top }) => node("span", { style:
        `left: ${xaxis._offset + xaxis._length + 8}px; top: ${yaxis._offset + top}px; max-width: ${labelWidth() - 8}px; ` +
        `color: var(--${lookOf(entry).colour}, ${LIGHT[lookOf(entry).colour]})` }, texts.get(entry.name))));
    }

    function drawBelow(palette = colours()) {
      const lines = shown().flatMap((entry) => entry.runs.map((run) => ({ run, faint: dimmed(entry) || grey(entry),
        colour: palette[grey(entry) ? "muted" : lookOf(entry).colour] })));
      below.draw({ lines, axis: state.axis, unit: unit(), range: plot._fullLayout.xaxis.range, layout: layout(palette) });
    }

    /* The chart always extends to the budget, or to twice the compute so far. */
    function included() {
      return data.end > 0 ? { include: [ofAll(data.end)].filter(known) } : {};
    }

    const config = { displaylogo: false, responsive: true, showTips: false, doubleClick: "reset", plotlyServerURL: "",
      modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d"]],
      toImageButtonOptions: { format: "svg", filename: "scalerl" } };

    function draw(onPaper = false) {
      const palette = colours(onPaper);
      words();
      if (plot.data) Plotly.Fx.unhover(plot);
      const first = !plot.data;
      return Plotly.react(plot, traces(palette), layout(palette), config).then(() => {
        if (first) plot.on("plotly_relayout", () => { placeLabels(); drawBelow(); });
        placeLabels();
        drawBelow(palette);
        element.dataset.drawn = `${state.axis} ${state.log ? "log" : "linear"}`;
      });
    }

    function later() {
      if (waiting) return;
      waiting = true;
      requestAnimationFrame(() => { waiting = false; draw(); });
    }

    function words() {
      const found = [];
      if (state.axis !== data.axis) {
        const of = data.axes.find((axis) => axis.key === data.axis);
        found.push(`Curves are fitted on ${of.label} and drawn here along each run’s own clock, beyond its last evaluation at its last pace.`);
        const without = data.runs.filter((run) => !has(run)).length;
        if (without) found.push(`Not drawn, as this axis was not logged: ${without} of ${data.runs.length} runs.`);
      }
      if (entries.some((entry) => entry.runs.length > 1)) {
        found.push("Of a group: evaluations of all its runs, and its mean curve over runs with the interval, the variance between seeds included.");
      }
      if (state.log) found.push("Evaluations before any training have no place on a logarithmic axis.");
      if (data.thinned) {
        const all = data.runs.reduce((sum, run) => sum + run.evaluations, 0);
        const drawn = data.runs.reduce((sum, run) => sum + run.pass_rate.length, 0);
        found.push(`Of ${amount(all)} evaluations ${amount(drawn)} are drawn: some at even steps, and the highest and the lowest of every stretch of a run. Fits are of all.`);
      }
      if (many()) found.push("Runs are grey until they are ticked.");
      note.textContent = found.join(" ");
    }

    // Controls

    function fill() {
      state.axis = data.axes.some((axis) => axis.key === state.axis) ? state.axis : data.axis;
      if (state.log === undefined) state.log = farApart();
      select.replaceChildren(...data.axes.map((axis) =>
        node("option", { value: axis.key, selected: axis.key === state.axis }, axis.label)));
      log.setAttribute("aria-pressed", String(state.log));
      const ways = data.groupings.filter((one) => one.groups.some((group) => group.runs.length > 1)).map((one) => one.by);
      // What was asked for stays asked for while the runs have no such groups, as a run alone.
      state.by = [...ways, "run"].includes(state.asked) ? state.asked : ways.includes("recipe") ? "recipe" : "run";
      by.replaceChildren(...[...ways, "run"].map((key) => node("option", { value: key, selected: key === state.by }, key)));
      byLabel.hidden = !ways.length;
      filter.hidden = data.runs.filter((run) => !run.task).length < FILTERED;
      below.fill(data);
      regroup();
    }

    function regroup() {
      entries = grouped();
      for (const { name, key } of data.runs) names.know(name, key);
      for (const { name, runs: [first] } of entries) names.know(name, `${first.key} ${name}`);
      const found = JSON.stringify(entries.map((entry) => [entry.name, entry.runs.length, entry.reason]));
      if (found !== state.names) fillLegend();
      state.names = found;
    }

    /* Whether the runs are of such different length that a linear axis shows but one of them. */
    function farApart() {
      const ends = data.runs.map((run) => Math.max(...(run.compute[state.axis] || [0]))).filter((end) => end > 0);
      return Math.max(...ends) > 10 * Math.min(...ends);
    }

    function fillLegend() {
      legend.hidden = entries.length === 1;
      legend.classList.toggle("many", many());
      const what = entries.some((entry) => entry.task) ? "Run and tasks" : state.by === "run" ? "Runs" : state.by === "recipe" ? "Recipes" : `Runs by ${state.by}`;
      legend.replaceChildren(node("legend", {}, many() ? `${what}, coloured where ticked` : what),
        node("ul", {}, ...entries.map(entryLine)));
    }

    function entryLine(entry) {
      const box = node("input", { type: "checkbox", checked: many() ? state.picked.has(entry.name) : !state.hidden.has(entry.name) });
      const sign = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      sign.setAttribute("class", "sc-sign");
      sign.setAttribute("aria-hidden", "true");
      const paint = () => {
        const looks = lookOf(entry);
        const colour = many() && !state.picked.has(entry.name) ? "muted" : looks.colour;
        const stroke = `var(--${colour}, ${LIGHT[colour]})`;
        sign.innerHTML = `<line x1="0" y1="7" x2="34" y2="7" stroke-width="2" style="stroke: ${stroke}" stroke-dasharray="${looks.dashes}"/>` +
          `<text x="17" y="11.5" text-anchor="middle" font-size="13" style="fill: ${stroke}">${looks.glyph}</text>`;
      };
      paint();
      box.addEventListener("change", () => {
        if (!many()) state.hidden[box.checked ? "delete" : "add"](entry.name);
        else if (box.checked) state.picked.set(entry.name, freeLook());
        else state.picked.delete(entry.name);
        paint();
        later();
      });
      const name = node("span", {}, names.of(entry.name));
      const label = node("label", {}, box, sign, name);
      if (entry.runs.length > 1) label.append(node("span", { class: "sc-why" }, `(${entry.runs.length} runs)`));
      if (entry.reason) label.append(node("span", { class: "sc-why" }, "(no curve)"));
      const point = (near) => () => { if (state.near !== near) { state.near = near; later(); } };
      for (const [event, near] of [["mouseenter", entry.name], ["mouseleave", null]]) label.addEventListener(event, point(near));
      box.addEventListener("focus", () => { if (box.matches(":focus-visible")) point(entry.name)(); });
      box.addEventListener("blur", point(null));
      const line = node("li", {}, label, renaming(entry, name));
      line.dataset.entry = entry.name;
      return line;
    }

    function renaming(entry, name) {
      const button = node("button", { type: "button", class: "sc-rename", title: "Rename", "aria-label": `Rename ${entry.name}` }, "✎");
      button.addEventListener("click", () => {
        const box = node("input", { value: names.of(entry.name), "aria-label": `Name of ${entry.name}` });
        const done = (keep) => {
          if (keep) names.set(entry.name, box.value);
          name.textContent = names.of(entry.name);
          later();
        };
        name.replaceChildren(box);
        box.addEventListener("keydown", (event) => {
          if (event.key !== "Enter" && event.key !== "Escape") return;
          event.preventDefault();
          done(event.key === "Enter");
          button.focus();
        });
        box.addEventListener("blur", () => { if (box.isConnected) done(true); });
        box.select();
      });
      return button;
    }

    function find() {
      state.filter = filter.value.trim();
      const found = new Set(entries.filter((entry) => entry.runs.some(passes)).map((entry) => entry.name));
      for (const line of legend.querySelectorAll("li")) line.hidden = !found.has(line.dataset.entry);
      later();
    }

    /* Evaluation by evaluation, by the arrow keys: what a pointer shows by hovering. */
    function walk(event) {
      const keys = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
      const move = keys[event.key];
      const runs = shown().flatMap((entry) => entry.runs);
      if (!move || !runs.length || event.target !== plot) return;
      event.preventDefault();
      const before = runs.findIndex((run) => state.at && run.name === state.at.name);
      const run = runs[(Math.max(before, 0) + move[0] + runs.length) % runs.length];
      const found = evaluated(run, run.noise, run.step);
      if (!found.length) return;
      const start = state.at ? state.at.place + move[1] : 0;
      const place = Math.min(Math.max(start, 0), found.length - 1);
      state.at = { name: run.name, place };
      said.textContent = hover(run, found[place]).replace(/<br>/g, ", ")
        .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
      pointAt(run, found[place]);
    }

    function pointAt(run, [x, y]) {
      const number = plot.data.findIndex((trace) =>
        trace.meta && (trace.meta.run === run.name || (trace.meta.names || []).includes(run.name)));
      const trace = plot.data[number];
      const at = trace.x.findIndex((value, i) =>
        value === x && trace.y[i] === y && (!trace.meta.names || trace.meta.names[i] === run.name));
      Plotly.Fx.hover(plot, [{ curveNumber: number, pointNumber: at }]);
    }

    by.addEventListener("change", () => { state.asked = state.by = by.value; state.hidden.clear(); state.picked.clear(); regroup(); find(); });
    filter.addEventListener("input", find);
    select.addEventListener("change", () => { state.axis = select.value; later(); });
    log.addEventListener("click", () => {
      state.log = !state.log;
      log.setAttribute("aria-pressed", String(state.log));
      later();
    });
    whole.addEventListener("click", () => Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": true }));
    plot.addEventListener("keydown", walk);
    drawnAnew(draw);
    fill();
    draw();
    names.all();
    return {
      update(newer) {
        data = newer;
        fill();
        later();
      },
    };
  };
})();
