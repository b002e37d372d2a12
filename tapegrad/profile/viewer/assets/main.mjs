// Puts the page together.

import { zoomRange } from "./axis.mjs";
import { Charts, toolbar } from "./charts.mjs";
import { cursorPanel, failure, focusOn, moveCursor, stepPeak } from "./cursor.mjs";
import { readPayload } from "./decode.mjs";
import { detailsPanel } from "./details.mjs";
import { byId, h } from "./dom.mjs";
import { cardsPanel } from "./cards.mjs";
import { flamePanel } from "./flame.mjs";
import { failurePanel, footer, header } from "./header.mjs";
import { helpDialog, listenToKeys } from "./keys.mjs";
import { lineagePanel } from "./lineage.mjs";
import { setRange, shownRange } from "./plot.mjs";
import { ranksPanel } from "./ranks.mjs";
import { arenasPanel } from "./arenas.mjs";
import { AXES, Run } from "./run.mjs";
import { sourcePanel } from "./source.mjs";
import { Store } from "./store.mjs";
import { GROUPS, tablePanel } from "./table.mjs";

function actionsOf(run, store) {
  const move = (event) => { if (event !== null) moveCursor(store, run, event); };
  const by = (n) => () => move(store.state.cursor + n);
  const far = (direction) => () => {
    const [from, to] = shownRange(run, store.state), xs = run.xs[store.state.axis], { cursor } = store.state;
    const x = xs[Math.max(cursor, 0)] + (direction * (to - from)) / 50;
    let e = cursor + direction;
    while (e > 0 && e < run.count - 1 && (direction > 0 ? xs[e] < x : xs[e] > x)) e += direction;
    move(e);
  };
  const zoom = (factor) => () => {
    const { cursor, axis } = store.state, range = shownRange(run, store.state), x = run.xs[axis][Math.max(cursor, 0)];
    setRange(store, run, zoomRange(range, factor, x >= range[0] && x <= range[1] ? x : (range[0] + range[1]) / 2));
  };
  const next = (list, value) => list[(list.indexOf(value) + 1) % list.length];
  const actions = {
    eventBefore: by(-1), eventAfter: by(1), eventBeforeFar: far(-1), eventAfterFar: far(1), first: () => move(0), last: () => move(run.count - 1),
    peak: () => move(run.peakEvent), oom: () => move(failure(run)),
    stepBefore: () => move(stepPeak(run, store.state.cursor, -1)), stepAfter: () => move(stepPeak(run, store.state.cursor, 1)),
    zoomIn: zoom(0.5), zoomOut: zoom(2), whole: () => store.set({ range: null }),
    axis: (axis) => store.set({ axis, range: sameEvents(run, store.state, axis) }), nextAxis: () => actions.axis(next(AXES, store.state.axis)),
    nextGroup: () => store.set({ group: next(GROUPS, store.state.group) }), filter: () => focusOn("filter"),
    theme: () => switchTheme(store), help: () => byId("help").showModal(),
    escape: () => { if (document.activeElement === byId("filter")) byId("filter").blur(); store.set({ query: "", chosen: new Set(), only: null, selected: -1 }); },
  };
  return actions;
}

/** The range on another axis that shows the same events. */
function sameEvents(run, { axis, range }, other) {
  if (!range || !run.count) return null;
  const xs = run.xs[axis], first = xs.findIndex((x) => x >= range[0]), last = xs.findLastIndex((x) => x <= range[1]);
  const [from, to] = [run.xs[other][Math.max(first, 0)], run.xs[other][Math.max(last, 0)]];
  return to > from ? [from, to] : null;
}

function isDark() {
  return (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}

function switchTheme(store) {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  store.set({ theme: document.documentElement.dataset.theme });
}

function build(run, store) {
  const actions = actionsOf(run, store), charts = new Charts(run, store);
  const tools = h("span.tools", {}, h("button", { type: "button", id: "theme", title: "light or dark (t)", onclick: actions.theme }, "light / dark"),
    h("button", { type: "button", title: "keys (?)", onclick: actions.help }, "keys"));
  const pictures = h("section.panel", { "aria-labelledby": "pictures-title" }, h("h2", { id: "pictures-title" }, "Memory over the run"),
    toolbar(run, store, actions), cursorPanel(run, store), charts.timeline.element,
    h("h3", { title: "a rectangle is as wide as a life and as high as its bytes; how far up it lies means nothing" }, "Allocations"), charts.strips.element, charts.mini.element);
  const parts = [header(run, tools), failurePanel(run, store), cardsPanel(run, store), pictures, flamePanel(run, store), ranksPanel(run, store), arenasPanel(run, store),
    h("div.columns", {}, tablePanel(run, store), h("div.side", {}, detailsPanel(run, store), sourcePanel(run, store))),
    lineagePanel(run, store), footer(run), charts.card, helpDialog()];
  byId("page").append(...parts.filter(Boolean));
  byId("page").hidden = false;
  byId("loading").remove();
  listenToKeys(actions);
  return charts;
}

function listenToWindow(store) {
  let size = 0;
  new ResizeObserver(() => store.set({ size: ++size })).observe(byId("page"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => store.set({ theme: event.matches ? "dark" : "light" }));
}

async function start() {
  const run = new Run(await readPayload(byId("payload").textContent));
  performance.mark("tapegrad-read");
  const store = new Store({
    axis: "time", range: null, cursor: run.peakEvent, query: "", chosen: new Set(), only: null, group: "allocation", sort: { by: "bytes", direction: -1 },
    rows: 200, selected: -1, hovered: -1, file: "", line: 0, flame: "", size: 0, theme: "",
  });
  const charts = build(run, store);
  store.drawAll();
  listenToWindow(store);
  // The first task after the frame in which everything was drawn.
  requestAnimationFrame(() => setTimeout(() => {
    performance.mark("tapegrad-drawn");
    document.documentElement.dataset.ready = "true";
  }));
  window.tapegradReport = { run, store, charts };
}

start().catch((error) => {
  byId("loading").textContent = `This report cannot be shown: ${error.message}`;
  throw error;
});
