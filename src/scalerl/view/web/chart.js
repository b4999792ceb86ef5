/* Runs laid over one another: evaluations, fitted curves with their bands, and forecasts as they were frozen.

   const chart = scalerlChart(element, data, options);   draws into `element`; needs Plotly, marks.js, and chart.css
   chart.update(data);                                   draws newer data; axis, zoom and choice of runs stay

   data     what `scalerl.view.runs.overlay.overlay` returns
   options  axis: key of the compute axis to open on; log: true or false; label: what a screen reader says

   After every drawing `element.dataset.drawn` is "AXIS linear" or "AXIS log". */
"use strict";

var scalerlChart = (() => {
  const { LIGHT, MOST_APART, colours, plain, rate, amount, node, faded, look } = scalerlMarks;
  const MOST_BANDS = 6;

  return function scalerlChart(element, data, options = {}) {
    const state = { axis: options.axis, log: options.log, frozen: false, near: null, at: null,
      hidden: new Set(), picked: new Map(), names: "" };
    const select = node("select");
    const log = node("button", { type: "button" }, "Logarithmic");
    const curves = node("select", {}, node("option", { value: "fit" }, "fitted on all evaluations"),
      node("option", { value: "frozen" }, "as forecasts were frozen"));
    const curvesLabel = node("label", {}, "Curves", curves);
    const whole = node("button", { type: "button" }, "Whole view");
    const plot = node("div", { class: "sc-plot", tabindex: "0", role: "group", "aria-label":
      (options.label || "Pass rate against compute") + ". Arrow keys go from evaluation to evaluation." });
    const said = node("p", { class: "sc-said", "aria-live": "polite" });
    const legend = node("fieldset", { class: "sc-legend" });
    const note = node("p", { class: "sc-note" });
    element.replaceChildren(
      node("div", { class: "sc-controls" }, node("label", {}, "Compute", select), log, curvesLabel, whole),
      plot, said, legend, note);
    let waiting = false;

    // What of the data is on this axis, and looks like what

    const known = (value) => value !== null && value !== undefined;
    const many = () => data.runs.length > MOST_APART;
    const unit = () => data.axes.find((axis) => axis.key === state.axis);
    const has = (run) => state.axis in run.compute;
    const grey = (run) => many() && !state.picked.has(run.name) && state.near !== run.name;
    const shown = () => data.runs.filter((run) => has(run) && !state.hidden.has(run.name));

    function lookOf(run) {
      if (!many()) return look(data.runs.indexOf(run));
      return look(state.picked.has(run.name) ? state.picked.get(run.name) : freeLook());
    }

    function freeLook() {
      const taken = new Set(state.picked.values());
      let place = 0;
      while (taken.has(place)) place += 1;
      return place;
    }

    /* Rows of (shown compute, ...columns) where the compute has a place on this axis. */
    function rows(compute, ...columns) {
      const size = unit().size;
      const found = [];
      (compute[state.axis] || []).forEach((value, i) => {
        if (value !== null && (value > 0 || !state.log)) found.push([value / size, ...columns.map((column) => column[i])]);
      });
      return found;
    }

    function leading(run) {
      return run.forecasts.find((forecast) => forecast.leads);
    }

    function curveOf(run) {
      if (!state.frozen) return run.fit && run.fit.curve;
      return leading(run) && leading(run).curve;
    }

    /* Compute up to which the drawn curve knew the run, and from where; null where nothing is drawn. */
    function windowOf(run) {
      const lead = leading(run);
      const ends = state.frozen ? lead && [0, lead.made[state.axis]] : run.fit && run.fit.window[state.axis];
      return ends && ends[1] !== null && ends[1] !== undefined ? ends.map((end) => end / unit().size) : null;
    }

    // Traces

    function curveTraces(run, colour, bands) {
      const curve = curveOf(run);
      const found = curve ? rows(curve.compute, curve.line, curve.low, curve.high) : [];
      if (!found.length) return [];
      const { dash } = lookOf(run);
      const dim = dimmed(run);
      const traces = [];
      if (bands) {
        const back = [...found].reverse();
        traces.push({ x: [...found, ...back].map((row) => row[0]),
          y: [...found.map((row) => row[3]), ...back.map((row) => row[2])],
          fill: "toself", fillcolor: faded(colour, dim ? 0.04 : 0.15), mode: "none", hoverinfo: "skip" });
      }
      const end = (windowOf(run) || [0, Infinity])[1] * (1 + 1e-6);
      const within = found.filter((row) => row[0] <= end);
      const beyond = found.filter((row) => row[0] > end);
      const line = (part, width) => ({ x: part.map((row) => row[0]), y: part.map((row) => row[1]), mode: "lines",
        line: { color: colour, dash, width }, opacity: dim ? 0.3 : 1, hoverinfo: "skip" });
      traces.push(line(within, state.near === run.name ? 3.2 : 2));
      if (beyond.length) traces.push(line([...within.slice(-1), ...beyond], 1));
      return traces;
    }

    function dimmed(run) {
      return state.near !== null && state.near !== run.name && !grey(run);
    }

    function pointTrace(run, colour, bars) {
      const found = rows(run.compute, run.pass_rate, run.noise, run.step, run.used);
      const { symbol } = lookOf(run);
      const ends = windowOf(run);
      const isKnown = (row) => (state.frozen ? !ends || row[0] <= ends[1] * (1 + 1e-9) : !run.fit || row[4]);
      const size = found.length > 300 ? 4 : found.length > 100 ? 5 : 6.5;
      return { x: found.map((row) => row[0]), y: found.map((row) => row[1]), mode: "markers", meta: { run: run.name },
        opacity: dimmed(run) ? 0.25 : 1,
        marker: { color: colour, size, symbol: found.map((row) => symbol + (isKnown(row) ? "" : "-open")) },
        error_y: { visible: bars && found.length <= 300 && found.some((row) => row[2] !== null), type: "data",
          array: found.map((row) => row[2] || 0), color: colour, thickness: 1, width: 0 },
        text: found.map((row) => hover(run, row)), hovertemplate: "%{text}<extra></extra>" };
    }

    function hover(run, [compute, pass, noise, step]) {
      return `${plain(run.name)}<br>` + (step === null ? "" : `step ${amount(step)}, `) +
        `${amount(compute)} ${plain(unit().label)}<br>pass rate ${rate(pass)}` +
        (noise ? ` ± ${rate(noise)}` : "");
    }

    /* Forecasts as they were frozen: the one that leads, and of a run alone all, each a little before the next. */
    function forecastTraces(run, colour) {
      const own = run === alone() ? run.forecasts : run.forecasts.filter((forecast) => forecast.leads);
      return own.flatMap((forecast, n) => forecastTrace(run, forecast, colour, own.length - 1 - n));
    }

    function forecastTrace(run, lead, colour, before) {
      const place = lead.interval && lead.target[state.axis] * (1 - 0.012 * before);
      if (!place) return [];
      const middle = (lead.interval[0] + lead.interval[1]) / 2;
      const text = `${plain(run.name)}<br>frozen at ${lead.step === null ? "an unknown step" : "step " + amount(lead.step)}: ` +
        `${rate(lead.median)} [${rate(lead.interval[0])}, ${rate(lead.interval[1])}]<br>` +
        (lead.measured === null ? "not measured yet" : `measured ${rate(lead.measured)}: ${lead.outcome}`);
      return [{ x: [place / unit().size], y: [middle], mode: "markers", opacity: dimmed(run) ? 0.25 : 1,
        marker: { color: colour, symbol: "line-ew-open", size: 9, line: { width: 1.5, color: colour } },
        error_y: { type: "data", array: [middle - lead.interval[0]], color: colour, thickness: lead.leads ? 2 : 1, width: 7 },
        text: [text], hovertemplate: "%{text}<extra></extra>" }];
    }

    /* All runs that are not picked: two traces for all, as a trace for each would take seconds. */
    function greyTraces(runs, colour) {
      const line = { x: [], y: [], mode: "lines", line: { color: colour, width: 1 }, opacity: 0.45, hoverinfo: "skip" };
      const dots = { x: [], y: [], text: [], mode: "markers", meta: { names: [] }, opacity: 0.45,
        marker: { color: colour, size: 3.5 }, hovertemplate: "%{text}<extra></extra>" };
      for (const run of runs) {
        const curve = curveOf(run);
        for (const [x, y] of curve ? rows(curve.compute, curve.line) : []) { line.x.push(x); line.y.push(y); }
        line.x.push(null);
        line.y.push(null);
        for (const row of rows(run.compute, run.pass_rate, run.noise, run.step)) {
          dots.x.push(row[0]);
          dots.y.push(row[1]);
          dots.text.push(hover(run, row));
          dots.meta.names.push(run.name);
        }
      }
      return [line, dots];
    }

    function traces(palette) {
      const runs = shown();
      const plainRuns = runs.filter(grey);
      const coloured = runs.filter((run) => !grey(run));
      const found = plainRuns.length ? greyTraces(plainRuns, palette.muted) : [];
      const few = coloured.length <= MOST_BANDS;
      for (const run of coloured) {
        found.push(...curveTraces(run, palette[lookOf(run).colour], few || state.near === run.name));
      }
      for (const run of coloured) {
        const colour = palette[lookOf(run).colour];
        if (run === alone()) found.push(...frozenTrace(run, palette));
        found.push(pointTrace(run, colour, few || state.near === run.name), ...forecastTraces(run, colour));
      }
      return found;
    }

    /* Of a run alone, the curve that the leading forecast was made with, from where it was made on. */
    function frozenTrace(run, palette) {
      const lead = leading(run);
      if (state.frozen || !lead || !lead.curve) return [];
      const from = (lead.made[state.axis] || 0) / unit().size;
      const found = rows(lead.curve.compute, lead.curve.line).filter((row) => row[0] >= from);
      return [{ x: found.map((row) => row[0]), y: found.map((row) => row[1]), mode: "lines", hoverinfo: "skip",
        line: { color: palette.later, width: 1.5, dash: "dash" } }];
    }

    // Layout

    /* The run that stands out: the only one, or the one that is pointed at. */
    function alone() {
      const coloured = shown().filter((run) => !grey(run));
      return coloured.find((run) => run.name === state.near) || (coloured.length === 1 ? coloured[0] : null);
    }

    function shapes(palette) {
      const found = [];
      const only = alone();
      const ends = only && windowOf(only);
      if (ends) {
        found.push({ type: "rect", xref: "x", yref: "paper", x0: Math.max(ends[0], state.log ? lowest() : 0), x1: ends[1],
          y0: 0, y1: 1, fillcolor: palette.window, line: { width: 0 }, layer: "below" });
      }
      found.push(...ceilingShapes(palette, only));
      const line = { color: palette.muted, width: 1.2, dash: "dot" };
      const budget = budgetAt();
      if (budget !== null) found.push({ type: "line", xref: "x", yref: "paper", x0: budget, x1: budget, y0: 0, y1: 1, line });
      if (data.target !== null) {
        found.push({ type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: data.target, y1: data.target, line });
      }
      return found;
    }

    /* Intervals of A as bars at the right edge; of a run alone also its level, a known ceiling, and its change. */
    function ceilingShapes(palette, only) {
      const across = { type: "line", xref: "paper", yref: "y", x0: 0, x1: 1 };
      const fitted = shown().filter((run) => !grey(run) && run.fit && run.fit.A).slice(0, MOST_BANDS);
      const found = fitted.map((run, n) => ({ type: "rect", xref: "paper", yref: "y", x0: 0.993 - 0.012 * n, x1: 1 - 0.012 * n,
        y0: Math.max(run.fit.A[1], 0), y1: Math.min(run.fit.A[2], 1), line: { width: 0 }, opacity: run.fit.identified ? 0.55 : 0.25,
        fillcolor: palette[fitted.length > 1 ? lookOf(run).colour : "ceiling"] }));
      if (!only) return found;
      if (known(only.known)) found.push({ ...across, y0: only.known, y1: only.known, line: { color: palette.muted, width: 1.2, dash: "dot" } });
      if (!only.fit) return found;
      if (only.fit.A) found.push({ ...across, y0: only.fit.A[0], y1: only.fit.A[0], line: { color: palette.ceiling, width: 1.2, dash: "dash" } });
      const at = only.fit.change[state.axis];
      if (known(at)) found.push({ type: "line", xref: "x", yref: "paper", x0: at / unit().size, x1: at / unit().size, y0: 0, y1: 1,
        line: { color: palette.later, width: 1.2, dash: "dash" } });
      return found;
    }

    function ceilingNotes(palette, look) {
      const only = alone();
      if (!only || !only.fit) return [];
      const { A, identified, misfit, change } = only.fit;
      const found = [];
      if (A) found.push({ ...look, xref: "paper", x: 0.985, xanchor: "right", y: A[0], yanchor: known(only.known) && only.known > A[0] ? "top" : "bottom", font: { color: palette.ceiling, size: 12 },
        text: `ceiling A ${rate(A[0])} [${rate(A[1])}, ${rate(A[2])}]${identified ? "" : ", not identified"}` });
      const at = change[state.axis];
      if (known(at)) found.push({ ...look, xref: "x", yref: "paper", y: 0.02, yanchor: "bottom", xanchor: "left",
        x: state.log ? Math.log10(at / unit().size) : at / unit().size, text: plain(misfit), font: { color: palette.later, size: 12 } });
      return found;
    }

    function budgetAt() {
      return data.budget !== null && state.axis === data.axis ? data.budget / unit().size : null;
    }

    function annotations(palette) {
      const look = { showarrow: false, font: { color: palette.muted, size: 12 }, bgcolor: faded(palette.paper, 0.75), borderpad: 1 };
      const budget = budgetAt();
      const found = [];
      if (budget !== null) {
        found.push({ ...look, text: "budget", xref: "x", yref: "paper", xanchor: "right", yanchor: "top", y: 1, x: state.log ? Math.log10(budget) : budget });
      }
      if (data.target !== null) {
        found.push({ ...look, text: `target ${rate(data.target)}`, xref: "paper", x: 1, xanchor: "right", y: data.target, yanchor: "top" });
      }
      return [...found, ...ceilingNotes(palette, look)];
    }

    function lowest() {
      let least = Infinity;
      for (const run of shown()) for (const [x] of rows(run.compute)) if (x < least) least = x;
      return least / 2;
    }

    function layout(palette) {
      const narrow = plot.clientWidth < 560;
      const axis = { gridcolor: palette.grid, linecolor: palette.muted, zeroline: false, tickcolor: palette.grid };
      return { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
        modebar: { bgcolor: "rgba(0,0,0,0)", color: palette.muted, activecolor: palette.ink },
        font: { color: palette.muted, size: 12, family: getComputedStyle(document.body).fontFamily },
        margin: { l: narrow ? 40 : 58, r: 14, t: 32, b: 46 }, uirevision: `${state.axis} ${state.log}`,
        dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", shapes: shapes(palette), annotations: annotations(palette),
        hoverlabel: { align: "left", bgcolor: palette.paper, bordercolor: palette.muted, font: { color: palette.ink, size: 13 } },
        xaxis: { ...axis, type: state.log ? "log" : "linear", rangemode: "tozero", autorangeoptions: included(), exponentformat: "SI", nticks: narrow ? 5 : 10,
          title: { text: `training compute (${plain(unit().label)})`, standoff: 8 } },
        yaxis: { ...axis, tickformat: ".2f", autorangeoptions: { clipmin: -0.03, clipmax: 1.03 },
          title: narrow ? { text: "" } : { text: "pass rate on the held-out prompts", standoff: 10 } } };
    }

    /* The chart always extends to the budget, or to twice the compute so far. */
    function included() {
      return state.axis === data.axis && data.end > 0 ? { include: [data.end / unit().size] } : {};
    }

    const config = { displaylogo: false, responsive: true, showTips: false, doubleClick: "reset", plotlyServerURL: "",
      modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d"]],
      toImageButtonOptions: { format: "svg", filename: "scalerl" } };

    function draw(onPaper = false) {
      const palette = colours(onPaper);
      words();
      if (plot.data) Plotly.Fx.unhover(plot);
      return Plotly.react(plot, traces(palette), layout(palette), config).then(() => {
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
        found.push(`Curves are fitted on ${of.label} and drawn here along each run’s own clock, as far as that is known.`);
        const without = data.runs.filter((run) => !has(run)).length;
        if (without) found.push(`Not drawn, as this axis was not logged: ${without} of ${data.runs.length} runs.`);
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
      curvesLabel.hidden = !data.runs.some((run) => run.forecasts.some((forecast) => forecast.curve));
      if (curvesLabel.hidden) state.frozen = false;
      const names = JSON.stringify(data.runs.map((run) => [run.name, run.reason]));
      if (names !== state.names) fillLegend();
      state.names = names;
    }

    /* Whether the runs are of such different length that a linear axis shows but one of them. */
    function farApart() {
      const ends = data.runs.map((run) => Math.max(...(run.compute[state.axis] || [0]))).filter((end) => end > 0);
      return Math.max(...ends) > 10 * Math.min(...ends);
    }

    function fillLegend() {
      legend.hidden = data.runs.length === 1;
      legend.classList.toggle("many", many());
      const list = node("ul", {}, ...data.runs.map(entry));
      const heading = node("legend", {}, many() ? "Runs, coloured where ticked" : "Runs");
      legend.replaceChildren(heading, ...(many() ? [search(list)] : []), list);
    }

    function entry(run) {
      const box = node("input", { type: "checkbox", checked: many() ? state.picked.has(run.name) : !state.hidden.has(run.name) });
      const sign = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      sign.setAttribute("class", "sc-sign");
      sign.setAttribute("aria-hidden", "true");
      const paint = () => {
        const looks = lookOf(run);
        const colour = many() && !state.picked.has(run.name) ? "muted" : looks.colour;
        const stroke = `var(--${colour}, ${LIGHT[colour]})`;
        sign.innerHTML = `<line x1="0" y1="7" x2="34" y2="7" stroke-width="2" style="stroke: ${stroke}" stroke-dasharray="${looks.dashes}"/>` +
          `<text x="17" y="11.5" text-anchor="middle" font-size="13" style="fill: ${stroke}">${looks.glyph}</text>`;
      };
      paint();
      box.addEventListener("change", () => {
        if (!many()) state.hidden[box.checked ? "delete" : "add"](run.name);
        else if (box.checked) state.picked.set(run.name, freeLook());
        else state.picked.delete(run.name);
        paint();
        later();
      });
      const label = node("label", {}, box, sign, node("span", {}, run.name));
      if (run.reason) label.append(node("span", { class: "sc-why" }, "(no curve)"));
      const point = (name) => () => { if (state.near !== name) { state.near = name; later(); } };
      for (const [event, name] of [["mouseenter", run.name], ["mouseleave", null]]) label.addEventListener(event, point(name));
      box.addEventListener("focus", () => { if (box.matches(":focus-visible")) point(run.name)(); });
      box.addEventListener("blur", point(null));
      return node("li", {}, label);
    }

    function search(list) {
      const box = node("input", { type: "search", placeholder: "Find a run", "aria-label": "Find a run" });
      box.addEventListener("input", () => {
        const wanted = box.value.toLowerCase();
        [...list.children].forEach((item) => { item.hidden = !item.textContent.toLowerCase().includes(wanted); });
      });
      return box;
    }

    /* Evaluation by evaluation, by the arrow keys: what a pointer shows by hovering. */
    function walk(event) {
      const keys = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowUp: [1, 0], ArrowDown: [-1, 0] };
      const move = keys[event.key];
      const runs = shown();
      if (!move || !runs.length || event.target !== plot) return;
      event.preventDefault();
      const before = runs.findIndex((run) => state.at && run.name === state.at.name);
      const run = runs[(Math.max(before, 0) + move[0] + runs.length) % runs.length];
      const found = rows(run.compute, run.pass_rate, run.noise, run.step);
      if (!found.length) return;
      const start = state.at ? state.at.place + move[1] : 0;
      const place = Math.min(Math.max(start, 0), found.length - 1);
      state.at = { name: run.name, place };
      said.textContent = hover(run, found[place]).replace(/<br>/g, ", ")
        .replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");
      label(run, found[place]);
    }

    function label(run, [x, y]) {
      const number = plot.data.findIndex((trace) =>
        trace.meta && (trace.meta.run === run.name || (trace.meta.names || []).includes(run.name)));
      const trace = plot.data[number];
      const at = trace.x.findIndex((value, i) =>
        value === x && trace.y[i] === y && (!trace.meta.names || trace.meta.names[i] === run.name));
      Plotly.Fx.hover(plot, [{ curveNumber: number, pointNumber: at }]);
    }

    select.addEventListener("change", () => { state.axis = select.value; later(); });
    curves.addEventListener("change", () => { state.frozen = curves.value === "frozen"; later(); });
    log.addEventListener("click", () => {
      state.log = !state.log;
      log.setAttribute("aria-pressed", String(state.log));
      later();
    });
    whole.addEventListener("click", () => Plotly.relayout(plot, { "xaxis.autorange": true, "yaxis.autorange": true }));
    plot.addEventListener("keydown", walk);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
    window.addEventListener("beforeprint", () => draw(true));
    window.addEventListener("afterprint", () => draw());
    fill();
    draw();
    return {
      update(newer) {
        data = newer;
        fill();
        later();
      },
    };
  };
})();
