/* Draws the chart of a page and its small multiples, and makes its tables sortable. Needs all other scripts.

   scalerlPage();   prepares what stands around the chart, also after it was replaced (live.js) */
"use strict";

/* The health of a run over its steps (scalerl/view/runs/panels.py says what a panel holds), drawn when the section
   that holds it is unfolded. */
function scalerlPanels() {
  const { colours, faded, node, amount, averaged, plain, frameOf, level, drawnAnew } = scalerlMarks;
  const SHARE = 1 / 24;  // of the values of a line that are averaged
  const drawn = [];

  function traces(panel, palette) {
    const shades = [palette.forecast, palette.later, palette.ink];
    return panel.lines.flatMap((line, n) => {
      const shared = { x: panel.x, mode: "lines", name: plain(line.name || panel.title), connectgaps: true };
      const raw = { ...shared, y: line.y, line: { color: line.smooth ? faded(shades[n], 0.35) : shades[n], width: 1 } };
      if (!line.smooth) return [raw];
      return [{ ...raw, hoverinfo: "skip" }, { ...shared, y: averaged(line.y, SHARE), line: { color: shades[n], width: 2 } }];
    });
  }

  function layout(panel, palette) {
    const axis = { gridcolor: palette.grid, linecolor: palette.muted, zeroline: false, nticks: 5, fixedrange: true };
    const mark = ({ from, to, level: how }) => ({ type: "rect", xref: "x", yref: "paper", x0: from, x1: to, y0: 0, y1: 1,
      fillcolor: faded(palette.later, how === "alarm" ? 0.28 : 0.12), line: { width: 0 }, layer: "below" });
    const bound = ({ name, value }) => level(value, { color: palette.later, width: 1, dash: name === "alarm" ? "dash" : "dot" });
    return { ...frameOf(palette, 11), height: 150, margin: { l: 42, r: 8, t: 6, b: 36 }, hovermode: "x", dragmode: false,
      shapes: [...panel.marks.map(mark), ...panel.bounds.map(bound)],
      xaxis: { ...axis, title: { text: "trainer step", standoff: 4 } },
      yaxis: { ...axis, rangemode: panel.zero ? "tozero" : "normal", exponentformat: "SI" } };
  }

  function last(line) {
    const values = (line.smooth ? averaged(line.y, SHARE) : line.y).filter((value) => value !== null);
    return `${line.name} ${values.length ? amount(values[values.length - 1]) : "–"}`.trim();
  }

  function draw(onPaper = false) {
    const palette = colours(onPaper);
    for (const [plot, panel] of drawn) {
      Plotly.react(plot, traces(panel, palette), layout(panel, palette), { displayModeBar: false, responsive: true });
    }
  }

  function unfold(place) {
    const panels = JSON.parse(place.querySelector("script").textContent);
    for (const panel of panels) {
      const plot = node("div", { class: "sc-panel-plot" });
      place.append(node("div", { class: "sc-panel" }, node("h4", {}, panel.title),
        node("p", { class: "note" }, `${panel.unit}; last: ${panel.lines.map(last).join(", ")}`), plot));
      drawn.push([plot, panel]);
    }
    draw();
  }

  drawnAnew(draw);
  return () => {
    drawn.length = 0;
    for (const place of document.querySelectorAll(".sc-panels")) {
      const fold = place.closest("details");
      if (!fold || fold.open) unfold(place);
      else fold.addEventListener("toggle", () => unfold(place), { once: true });
    }
  };
}

const scalerlPage = (() => {
  const panels = scalerlPanels();

  /* The number that a cell begins with, else its text; what is missing comes last. */
  function valueOf(row, place) {
    const text = row.cells[place].firstChild ? row.cells[place].firstChild.textContent.trim() : "";
    const number = parseFloat(text.replaceAll(",", "").replace("−", "-").replace(/^[×+]/, ""));
    return { text, number, missing: text === "" || text === "–" };
  }

  function sort(head) {
    const table = head.closest("table");
    const down = head.getAttribute("aria-sort") !== "descending";
    const compare = (a, b) => (Number.isNaN(a.number) || Number.isNaN(b.number) ? a.text.localeCompare(b.text) : a.number - b.number);
    const rows = [...table.tBodies[0].rows].map((row) => [row, valueOf(row, head.cellIndex)]);
    rows.sort(([, a], [, b]) => a.missing - b.missing || (down ? -1 : 1) * compare(a, b));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.tBodies[0].append(...rows.map(([row]) => row));
  }

  function sortable(head) {
    if (head.closest("table").tBodies[0].rows.length < 3) return;
    head.tabIndex = 0;
    head.classList.add("sortable");
    head.addEventListener("click", () => sort(head));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(head); });
  }

  return () => {
    panels();
    document.querySelectorAll(".sheet thead th").forEach(sortable);
    scalerlMarks.names.all();
  };
})();

(() => {
  const data = document.getElementById("runs");
  if (data && data.type === "application/json") {
    scalerlChart.ofPage = scalerlChart(document.getElementById("chart"), JSON.parse(data.textContent), document.title);
  }
  scalerlPage();
})();
