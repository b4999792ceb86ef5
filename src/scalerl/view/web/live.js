/* A page of a served run, kept as it is now: whatever has changed of it is fetched again. */
"use strict";

(() => {
  let busy = false;
  let before = "";

  async function renew() {
    if (busy || document.hidden) return;
    busy = true;
    try {
      const text = await (await fetch(location.href)).text();
      if (before && text !== before) show(new DOMParser().parseFromString(text, "text/html"));
      before = text;
    } finally {
      setTimeout(() => { busy = false; }, 1000);
    }
  }

  function show(newer) {
    for (const part of ["header", ".cautions", "section.long"]) {
      const [own, others] = [document, newer].map((page) => [...page.querySelectorAll(part)]);
      own.forEach((one, n) => { if (others[n]) one.replaceWith(document.importNode(others[n], true)); });
    }
    const data = newer.getElementById("runs");
    if (data && scalerlChart.ofPage) scalerlChart.ofPage.update(JSON.parse(data.textContent));
  }

  new EventSource("../events").onmessage = renew;
})();
