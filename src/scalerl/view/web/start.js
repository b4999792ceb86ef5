/* Draws the chart of a page, and makes its tables sortable. */
"use strict";

(() => {
  const data = document.getElementById("runs");
  const place = document.getElementById("chart");
  if (data && data.type === "application/json") {
    scalerlChart.ofPage = scalerlChart(place, JSON.parse(data.textContent), { label: document.title });
    scalerlPanels();
  } else if (!place) scalerlPanels();

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

  for (const head of document.querySelectorAll(".sheet thead th")) {
    if (head.closest("table").tBodies[0].rows.length < 3) continue;
    head.tabIndex = 0;
    head.classList.add("sortable");
    head.addEventListener("click", () => sort(head));
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(head); });
  }
})();
