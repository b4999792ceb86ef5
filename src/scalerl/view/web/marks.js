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

  /* Plotly takes texts for markup: these come out as they are. */
  function plain(text, most = 60) {
    const short = text.length > most ? text.slice(0, most - 1) + "…" : text;
    return short.replace(/\s+/g, " ").replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  }

  function rate(value) {
    if (value === null || value === undefined) return "–";
    return value.toFixed(3).replace(/^(-?)0\./, "$1.");
  }

  function amount(value) {
    return Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 });
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

  return { LIGHT, MOST_APART, colours, plain, rate, amount, node, faded, look };
})();
