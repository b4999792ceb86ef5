/* A page of a served run, kept as it is now: whatever has changed of it is fetched again. */
"use strict";

(() => {
  let busy = false;
  let newer = false;
  let data = document.getElementById("runs").textContent;

  async function renew() {
    newer = busy;
    if (busy) return;
    busy = true;
    try {
      const text = await (await fetch(location.href)).text();
      show(new DOMParser().parseFromString(text, "text/html"));
    } catch { /* the server is gone: this is what it said last */ }
    await new Promise((done) => setTimeout(done, 1000));
    busy = false;
    if (newer) renew();
  }

  function show(page) {
    const found = page.getElementById("runs");
    if (!found || found.textContent === data) return;
    data = found.textContent;
    for (const part of ["header", ".cautions", "section.long"]) {
      const [own, others] = [document, page].map((one) => [...one.querySelectorAll(part)]);
      own.forEach((one, n) => { if (others[n]) one.replaceWith(document.importNode(others[n], true)); });
    }
    scalerlChart.ofPage.update(JSON.parse(data));
  }

  new EventSource("../events").onmessage = renew;
})();
