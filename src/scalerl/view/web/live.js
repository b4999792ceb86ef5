/* A page of a served run, kept as it is now: when something has changed, all but the chart is replaced. */
"use strict";

(() => {
  let data = document.getElementById("runs").textContent;

  const renew = scalerlMarks.oneAtATime(async () => {
    try {
      const answer = await fetch(location.href);
      if (answer.ok) show(new DOMParser().parseFromString(await answer.text(), "text/html"));
      else tell(answer.status === 404 ? "A run of this page is gone; this is what it was last." : (await answer.json()).error);
    } catch { lost(); }
  }, 1000);

  const lost = () => tell("The server does not answer; this is what it said last.");

  /* Stands until the page is renewed. */
  function tell(text) {
    const note = document.getElementById("state") || scalerlMarks.node("p", { id: "state", class: "note", role: "status" });
    note.textContent = text;
    document.querySelector("header").append(note);
  }

  function show(page) {
    const found = page.getElementById("runs");
    const open = new Set(folds().filter((one) => one.open).map(called));
    const sorted = [...document.querySelectorAll("th[aria-sort]")].map((head) => [nth(head), head.ariaSort]);
    const focused = [...document.querySelectorAll(REACHED)].indexOf(document.activeElement);
    around(document.querySelector("main"), page.querySelector("main"));
    for (const one of folds()) one.open = open.has(called(one));
    scalerlPage();
    for (const [place, way] of sorted) {
      const head = document.querySelectorAll("th")[place];
      while (head && head.classList.contains("sortable") && head.ariaSort !== way) head.click();
    }
    if (focused >= 0 && document.activeElement === document.body) document.querySelectorAll(REACHED)[focused]?.focus({ preventScroll: true });
    if (found.textContent === data) return;
    data = found.textContent;
    scalerlChart.ofPage.update(JSON.parse(data));
  }

  const REACHED = "main :is(a, summary, th.sortable)";
  const folds = () => [...document.querySelectorAll("main details")];
  const called = (fold) => fold.querySelector("summary").textContent.replace(/\d+|s$/g, "");
  const nth = (head) => [...document.querySelectorAll("th")].indexOf(head);

  /* All but the chart is as the newer page has it; the chart stays in its place. */
  function around(own, newer) {
    const [chart, other] = [own, newer].map((one) => [...one.children].find((child) => child.matches("#chart, :has(#chart)")));
    for (const one of [...own.childNodes]) if (one !== chart) one.remove();
    let after = false;
    for (const one of newer.childNodes) {
      if (one === other) after = true;
      else if (after) own.append(document.importNode(one, true));
      else chart.before(document.importNode(one, true));
    }
    if (chart.id !== "chart") around(chart, other);
  }

  const events = new EventSource("../events");
  events.onmessage = renew;
  events.onerror = lost;
})();
