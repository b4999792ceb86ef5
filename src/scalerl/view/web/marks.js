/* What a chart (chart.js) is made of: colours, signs and dashes of runs, numbers and texts as Plotly takes them. */
"use strict";

var scalerlMarks = (() => {
  // The palette of scalerl/view/style.py, light: for pages that define no colours, and for paper.
  const LIGHT = {
    ink: "#1b1f24", muted: "#68717d", grid: "#e4e7eb", window: "#f2f4f6", paper: "#ffffff",
    forecast: "#0072b2", later: "#d55e00", ceiling: "#00805c", purple: "#aa4499", sky: "#2a95d5",
  };
  const COLOURS = ["forecast", "later", "ceiling", "purple", "ink", "sky"];
  const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross"];
  const GLYPHS = ["●", "■", "▲", "◆", "▼", "✚"];
  const DASHES = [["solid", ""], ["dash", "7 4"], ["dot", "2 3"], ["dashdot", "7 3 2 3"]];
  const MOST_APART = COLOURS.length * DASHES.length;  // with more runs, all are grey but those picked

  function colours(onPaper) {
    const style = getComputedStyle(document.documentElement);
    const found = {};
    for (const [name, value] of Object.entries(LIGHT)) {
      found[name] = (!onPaper && style.getPropertyValue("--" + name).trim()) || value;
    }
    return found;
  }

  const known = (value) => value !== null && value !== undefined;
  const clear = "rgba(0,0,0,0)";

  /* What every plot has. */
  function frameOf(palette, size = 12) {
    return { paper_bgcolor: clear, plot_bgcolor: clear, showlegend: false,
      font: { color: palette.muted, size, family: getComputedStyle(document.body).fontFamily },
      hoverlabel: { align: "left", bgcolor: palette.paper, bordercolor: palette.muted, font: { color: palette.ink, size: size + 1 } } };
  }

  /* Lines through the whole frame of a plot. */
  const upright = (x, line) => ({ type: "line", xref: "x", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line });
  const level = (y, line) => ({ type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: y, y1: y, line });

  /* Draws again in other colours: dark or light, and on paper. */
  function drawnAnew(draw) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
    window.addEventListener("beforeprint", () => draw(true));
    window.addEventListener("afterprint", () => draw());
  }

  /* Plotly takes texts for markup: these come out as they are. */
  function plain(text, most = 60) {
    const short = text.length > most ? text.slice(0, most - 1) + "…" : text;
    return short.replace(/\s+/g, " ").replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function rate(value) {
    return known(value) ? value.toFixed(3) : "–";
  }

  /* A probability as `chance_text` of scalerl/numbers.py has it. */
  function chance(value) {
    if (value > 0.99 || value < 0.01) return value > 0.5 ? "over 99 %" : "under 1 %";
    return `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)} %`;
  }

  function amount(value) {
    return Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
  }

  /* The running mean of values over a share of them; what is not known is left out. */
  function averaged(values, share) {
    const half = Math.round((values.length * share) / 2);
    if (!half) return values;
    const sums = [0], counts = [0];
    values.forEach((value, i) => {
      sums.push(sums[i] + (value ?? 0));
      counts.push(counts[i] + (value !== null));
    });
    return values.map((value, i) => {
      const [from, to] = [Math.max(i - half, 0), Math.min(i + half + 1, values.length)];
      return value === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  }

  /* From the values of `from` to those of `to`, linear between two of them, from 0 on; beyond the last at the last
     pace. Null where nothing is known. */
  function clock(from, to) {
    const known = [[0, 0], ...from.map((value, i) => [value, to[i]])]
      .filter(([one, other]) => one !== null && other !== null).sort((a, b) => a[0] - b[0]);
    const last = known.at(-1);
    const before = known.findLast(([one]) => one < last[0]);
    return (value) => {
      if (!before) return null;
      const place = known.findIndex(([one], i) => i && one >= value);
      const [[a, b], [c, d]] = place < 0 ? [before, last] : known.slice(place - 1, place + 1);
      return c > a ? b + ((value - a) / (c - a)) * (d - b) : d;
    };
  }

  function node(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name in made && typeof value !== "string") made[name] = value;
      else made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  /* Does `work` one call at a time, with a pause after each; once more where it was called meanwhile. */
  function oneAtATime(work, pause = 0) {
    let busy = false;
    let again = false;
    return async function call() {
      again = busy;
      if (busy) return;
      busy = true;
      try {
        await work();
        await new Promise((done) => setTimeout(done, pause));
      } finally {
        busy = false;  // also after an error, or the next call would do nothing
      }
      if (again) call();
    };
  }

  function faded(colour, alpha) {
    const n = parseInt(colour.slice(1).length === 3 ? colour.slice(1).replace(/./g, "$&$&") : colour.slice(1), 16);
    return `rgba(${n >> 16}, ${(n >> 8) & 255}, ${n & 255}, ${alpha})`;
  }

  function look(place) {
    const round = Math.floor(place / COLOURS.length);
    const symbol = (place + round) % SYMBOLS.length;
    const [dash, dashes] = DASHES[round % DASHES.length];
    return { colour: COLOURS[place % COLOURS.length], symbol: SYMBOLS[symbol], glyph: GLYPHS[symbol], dash, dashes };
  }

  /* Names that were given to runs and recipes in this browser, kept for its next visit by the keys of runs. */
  const names = (() => {
    let kept = {};
    try { kept = JSON.parse(localStorage.getItem("scalerl names") || "{}"); } catch { /* no storage for this page */ }
    const keys = new Map();  // by the names that this page shows
    const keyOf = (name) => keys.get(name) ?? name;
    return {
      know: (name, key) => { if (!keys.has(name)) keys.set(name, key); },
      of: (name, key = keyOf(name)) => (Object.hasOwn(kept, key) ? kept[key] : name),
      set(name, shown) {
        const before = names.of(name);
        if (shown.trim() && shown !== name) kept[keyOf(name)] = shown.trim();
        else delete kept[keyOf(name)];
        try { localStorage.setItem("scalerl names", JSON.stringify(kept)); } catch { /* for this visit, then */ }
        show(before, names.of(name));
        document.dispatchEvent(new Event("renamed"));
      },
      all: () => keys.forEach((_, name) => show(name, names.of(name))),
    };
  })();

  /* In tables and answers, where a name stands alone. */
  function show(before, after) {
    for (const one of document.querySelectorAll("h1, td:first-child, td:first-child a, .said b")) {
      const first = one.firstChild;
      if (first && first.nodeType === Node.TEXT_NODE && first.textContent.trim() === before) first.textContent = after;
    }
  }

  /* Whether a run has every word of a filter: in its name, path or recipe, or as KEY=VALUE of the recipe. */
  function matches(run, filter) {
    const recipe = Object.entries(run.recipe || {}).map(([key, value]) => `${key}=${value}`.toLowerCase());
    const name = `${run.name} ${names.of(run.name, run.key)} ${run.path || ""}`.toLowerCase();
    return filter.toLowerCase().split(/\s+/).every((word) => name.includes(word) || recipe.some((one) =>
      (word.includes("=") ? one === word || one.endsWith(`.${word}`) : one.includes(word))));
  }

  return { LIGHT, MOST_APART, names, matches, known, clear, frameOf, level, upright, drawnAnew, colours, plain, rate, chance, amount,
    averaged, clock, node, oneAtATime, faded, look };
})();
