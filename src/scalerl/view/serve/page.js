/* The list of runs, followed live; the chosen ones laid over one another (chart.js). */
"use strict";

(() => {
  const { node, oneAtATime, known, rate, chance, names, matches } = scalerlMarks;
  const MOST = 40;  // as the server has it
  const at = (id) => document.getElementById(id);
  const body = document.querySelector("#runs tbody");
  const rows = new Map();  // by id: {run, line, box}
  let chosen = new Set();
  let version = 0;
  let axis = "";
  let chart = null;
  let chartOf = "";  // ids of the runs that are drawn
  let fittedOn = "";
  let first = true;

  // The token is in a cookie from here on, and out of the address and the history.
  const address = new URL(location.href);
  if (address.searchParams.has("token")) {
    address.searchParams.delete("token");
    history.replaceState(null, "", address);
  }

  const whole = (value) => (known(value) ? value.toLocaleString("en") : "–");
  const spread = ([low, high]) => `[${rate(low)}, ${rate(high)}]`;

  const clipped = (text) => (text.length > 70 ? `${text.slice(0, 70).replace(/\s+\S*$/, "")}…` : text);
  const many = (count, name) => `${whole(count)} ${name}${count === 1 ? "" : "s"}`;

  function duration(seconds) {
    if (seconds < 120) return `${Math.max(seconds, 0).toFixed(0)} s`;
    if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
    return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(0)} d`;
  }

  async function ask(path) {
    const answer = await fetch(path);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error || `the server answers ${answer.status}`);
    return found;
  }

  // The list

  function line(run) {
    const made = rows.get(run.id) || { line: node("tr"), box: node("input", { type: "checkbox" }) };
    if (!made.run) made.box.addEventListener("change", () => choose(run.id, made.box.checked));
    made.run = run;
    made.box.disabled = !run.evaluations;
    const shown = run.path === run.name ? "" : run.path;
    const name = node("span", { class: "name" }, names.of(run.name, run.key), node("small", {}, shown));
    const head = node("th", { scope: "row" }, node("label", {}, made.box, name),
      ...(run.evaluations ? [node("a", { href: `run/${run.id}`, "aria-label": `Page of ${run.name}` }, "page")] : []), ...notes(run, made));
    made.line.replaceChildren(head, ...cells(run));
    rows.set(run.id, made);
  }

  /* What was assumed or missed while its log was read; it stays open while the row changes. */
  function notes(run, made) {
    if (!run.notes || !run.notes.length) return [];
    const found = node("details", made.open ? { open: "" } : {},
      node("summary", {}, many(run.notes.length, "note")), ...run.notes.map((text) => node("small", {}, text)));
    found.addEventListener("toggle", () => { made.open = found.open; });
    return [found];
  }

  function cells(run) {
    if (!known(run.evaluations)) return [node("td", { class: "error", colspan: "6" }, run.error)];
    const cell = (label, text, kind = "") => node("td", { "data-label": label, class: kind }, text);
    return [
      cell("step", whole(run.last_step)),
      passRate(run),
      forecast(run),
      cell("ceiling A", ceiling(run), "wide"),
      state(run),
      last(run),
    ];
  }

  /* With what was evaluated; a training reward or another reward is no pass rate, which its kind says. */
  function passRate(run) {
    const { name, kind, dataset } = run.metric;
    const what = [name, dataset && `of ${dataset}`, kind === "pass rate" ? "" : kind].filter(Boolean).join(", ");
    return node("td", { "data-label": "pass rate" }, rate(run.pass_rate),
      node("small", { title: [what, ...run.metric.others].join("\n") }, clipped(what)));
  }

  function last(run) {
    const age = run.updated ? `${duration(Date.now() / 1000 - run.updated)} ago` : "–";
    return node("td", { "data-label": "last line" }, age);
  }

  /* Of one evaluation at the budget; where nobody says when a run ends, at twice the compute so far. */
  function forecast(run) {
    const made = node("td", { "data-label": "forecast", class: "wide" });
    if (run.forecast) {
      made.append(`${rate(run.forecast.median)} ${spread(run.forecast.prediction)}`,
        node("small", {}, `at ${run.end_shown}, ${run.end_known ? "the budget" : "twice its compute so far"}`));
    } else if (run.waits) made.append("…");
    else {
      const why = run.no_forecast || "–";
      const early = run.evaluations < 6 ? `too early: ${many(run.evaluations, "evaluation")}` : clipped(why);
      made.append(node("span", { class: "why", title: why }, early));
    }
    return made;
  }

  function ceiling(run) {
    if (!run.ceiling) return run.waits ? "…" : "–";
    if (run.ceiling.lack_of_fit) return `withheld: ${run.ceiling.lack_of_fit}`;
    return `${rate(run.ceiling.A)} ${run.ceiling.identified ? spread(run.ceiling.interval) : "not identified"}`;
  }

  function state(run) {
    const open = (run.alarms || []).filter((alarm) => alarm.until === null);
    const told = [...(run.error ? [run.error] : []), ...open.map((alarm) => alarm.text)];
    const made = node("td", { "data-label": "state", class: told.length ? "wide" : "" });
    const going = run.ended === false ? "not ended" : "–";  // a log of another trainer does not say
    const words = [run.ended ? "ended" : known(run.share) ? `${Math.round(100 * run.share)} %` : going];
    const left = known(run.eta) ? run.eta - (Date.now() / 1000 - run.as_of) : 0;
    if (left > 0) words.push(`${duration(left)} to go`);
    made.append(words.join(", "));
    if (run.target) {
      const verdict = `${run.target.verdict.toUpperCase()}, ${chance(run.target.probability)}: ${rate(run.target.pass_rate)}`;
      made.append(node("small", { class: run.target.verdict === "go" ? "good" : "" }, verdict));
    }
    for (const text of told) made.append(node("small", { class: "told" }, text));
    return made;
  }

  let backwards = false;

  function order() {
    const by = at("order").value;
    const value = ({ run }) => {
      if (by === "name") return 0;
      if (by === "ceiling") return (run.ceiling && run.ceiling.A) ?? -1;
      return (by === "forecast" ? run.forecast && run.forecast.median : run[by]) ?? -1;
    };
    const way = backwards ? -1 : 1;
    const found = [...rows.values()].sort((a, b) => way * (value(b) - value(a) ||
      a.run.name.localeCompare(b.run.name) || a.run.path.localeCompare(b.run.path)));
    if (found.some((one, n) => body.children[n] !== one.line)) body.append(...found.map((one) => one.line));
    for (const head of document.querySelectorAll("#runs thead button")) {
      if (head.value !== by) head.parentElement.removeAttribute("aria-sort");
      else head.parentElement.setAttribute("aria-sort", backwards === (by !== "name") ? "ascending" : "descending");
    }
  }

  function filter() {
    for (const { run, line: shown } of rows.values()) shown.hidden = !matches(run, at("find").value.trim());
  }

  async function refresh() {
    const found = await ask(`api/runs?since=${version}`);
    const focused = document.activeElement;
    version = found.version;
    const ids = new Set(found.ids);
    for (const [id, one] of rows) {
      if (!ids.has(id)) { one.line.remove(); rows.delete(id); chosen.delete(id); }
    }
    found.runs.forEach(line);
    order();
    filter();
    // What is moved in the page loses the focus.
    if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
    at("folder").textContent = found.folder;
    document.title = `${found.folder} · scalerl`;
    const running = [...rows.values()].filter(({ run }) => known(run.evaluations) && run.ended === false).length;
    const unread = [...rows.values()].filter(({ run }) => !known(run.evaluations)).length;
    const says = [...rows.values()].some(({ run }) => known(run.ended));
    const count = many(rows.size - unread, "run") + (says ? `, ${whole(running)} not ended` : "") +
      (unread ? `, ${whole(unread)} not read` : "");
    at("state").textContent = found.looking ? `${count}; looking for more` : count;
    at("empty").hidden = rows.size > 0 || found.looking;
    at("empty").textContent = `No runs in ${found.folder} yet: they are shown as soon as there are any.`;
    if (first && !found.looking) start(found.ids);
    if (found.runs.some((run) => chosen.has(run.id)) || [...chosen].join() !== chartOf) draw();
  }

  // What is chosen: it is in the address, so that a view can be kept or sent

  function start(ids) {
    first = false;
    const asked = new URLSearchParams(location.hash.slice(1));
    axis = asked.get("axis") || "";
    chosen = new Set((asked.get("runs") || "").split(",").filter((id) => ids.includes(id)));
    const newest = [...rows.values()].filter(({ run }) => run.evaluations)
      .sort((a, b) => (b.run.updated || 0) - (a.run.updated || 0));
    if (!chosen.size) newest.slice(0, 3).forEach(({ run }) => chosen.add(run.id));
    for (const [id, { box }] of rows) box.checked = chosen.has(id);
  }

  function choose(id, on) {
    chosen[on ? "add" : "delete"](id);
    keep();
    draw();
  }

  function keep() {
    const kept = new URLSearchParams({ runs: [...chosen].join(",") });
    if (axis) kept.set("axis", axis);
    history.replaceState(null, "", `#${kept}`);
  }

  // The chart; one question at a time, and the last one counts

  const draw = oneAtATime(overlay);

  async function overlay() {
    const ids = [...chosen].join();
    at("compare").disabled = chosen.size < 2 || chosen.size > MOST;
    if (!chosen.size || chosen.size > MOST) {
      at("why").textContent = chosen.size ? `Choose up to ${MOST} runs.` : "Choose runs in the list.";
      at("chart").hidden = at("sentence").hidden = true;
      chartOf = "";
      return;
    }
    try {
      const data = await ask(`api/overlay?runs=${ids}${axis ? `&axis=${encodeURIComponent(axis)}` : ""}`);
      at("why").textContent = data.runs.filter((run) => run.reason).map((run) => `${run.name}: ${run.reason}.`).join(" ");
      axes(data);
      at("sentence").textContent = data.sentence;
      at("chart").hidden = at("sentence").hidden = false;
      if (chart) chart.update(data);
      else chart = scalerlChart(at("chart"), data);
      if (fittedOn !== data.axis) drawOn(data.axis);
      [chartOf, fittedOn] = [ids, data.axis];
    } catch (error) {
      at("why").textContent = `${error.message}.`;
      if (axis) { axis = ""; draw(); }
    }
  }

  /* Another axis of the fits is drawn on that axis, until another is chosen in the chart. */
  function drawOn(key) {
    const select = at("chart").querySelector(".sc-controls select");
    if (select.value === key) return;
    select.value = key;
    select.dispatchEvent(new Event("change"));
  }

  function axes(data) {
    at("axis").replaceChildren(...data.common.map(({ key, name }) => node("option", { value: key }, name)));
    at("axis").value = data.axis;
  }

  // Live

  // Many changes at once are one.
  const changed = oneAtATime(() => refresh().catch((error) => { at("state").textContent = `${error.message}.`; }), 500);

  let lost = false;

  function follow() {
    const events = new EventSource("events");
    events.onopen = () => { if (lost) changed(); lost = false; };
    events.onmessage = (event) => { if (Number(event.data) !== version) changed(); };
    events.onerror = () => {
      lost = true;
      at("state").textContent = "The server does not answer; this is what it said last.";
      if (events.readyState === EventSource.CLOSED) setTimeout(follow, 3000);
    };
  }

  at("find").addEventListener("input", filter);
  document.addEventListener("renamed", () => { for (const { run } of rows.values()) line(run); });
  at("order").addEventListener("change", () => { backwards = false; order(); });
  for (const head of document.querySelectorAll("#runs thead button")) {
    head.addEventListener("click", () => {
      backwards = at("order").value === head.value && !backwards;
      at("order").value = head.value;
      order();
    });
  }
  // Runs of one recipe count as its seeds there.
  at("compare").addEventListener("click", () =>
    location.assign(`run/${[...chosen].join()}${axis ? `?axis=${encodeURIComponent(axis)}` : ""}`));
  at("axis").addEventListener("change", () => { axis = at("axis").value; keep(); draw(); });
  at("none").addEventListener("click", () => {
    chosen.clear();
    for (const { box } of rows.values()) box.checked = false;
    keep();
    draw();
  });
  setInterval(() => { for (const { run, line: shown } of rows.values()) {
    if (known(run.evaluations)) [...shown.cells].slice(-2).forEach((cell, n) => cell.replaceWith(n ? last(run) : state(run)));
  } }, 10000);
  changed();
  follow();
})();
