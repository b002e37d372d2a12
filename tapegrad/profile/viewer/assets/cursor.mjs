// The cursor: one event of the run.  Everything below the pictures shows what was alive right after it.

import { byId, h } from "./dom.mjs";
import { momentText } from "./describe.mjs";
import { exactBytes, formatBytes, formatCount, formatShare, formatTime } from "./format.mjs";
import { shownRange } from "./plot.mjs";

/** Sets the cursor, and moves the shown range along if the cursor would be outside. */
export function moveCursor(store, run, event) {
  if (!run.count) return;
  const cursor = Math.min(Math.max(event, 0), run.count - 1);
  const [from, to] = shownRange(run, store.state), x = run.xs[store.state.axis][cursor];
  if (x >= from && x <= to) return store.set({ cursor });
  const half = (to - from) / 2;
  store.set({ cursor, range: [x - half, x + half] });
}

/** The event at which most was alive in the nearest step before (-1) or after (1) the cursor. */
export function stepPeak(run, cursor, direction) {
  const { steps } = run.tables, seq = cursor < 0 ? -1 : run.events.seq[cursor], peaks = [...steps.peak_seq];
  const here = run.stepAt(seq);
  if (direction > 0) {
    const next = here >= 0 ? here + 1 : peaks.findIndex((peak) => peak > seq);
    return next >= 0 && next < peaks.length ? run.eventAt(peaks[next]) : null;
  }
  const before = here >= 0 ? here - 1 : peaks.findLastIndex((peak) => peak < seq);
  return before >= 0 ? run.eventAt(peaks[before]) : null;
}

/** The event of the last failure for want of memory, or null. */
export function failure(run) {
  const { kind, seq } = run.tables.marks, i = kind.lastIndexOf(run.header.mark_kinds.indexOf("oom"));
  return i < 0 ? null : Math.max(run.eventAt(seq[i]), 0);
}

/** The line that says where the cursor is, and the categories: a legend with figures that also chooses. */
export function cursorPanel(run, store) {
  const total = h("strong", { id: "cursor-total" }), moment = h("span", { id: "moment" });
  const chips = run.categories.map((name, i) =>
    h("button.chip", { type: "button", "data-category": name, "aria-pressed": "false", onclick: () => toggle(store, i) },
      h("span.swatch", { style: `background: var(--${name})` }), h("span.name", {}, name), h("span.figure")));
  store.watch(["cursor", "chosen"], ({ cursor, chosen }) => {
    const sums = run.sums(cursor), all = run.total(cursor);
    total.textContent = `${formatBytes(all)} alive`;
    total.title = exactBytes(all);
    total.dataset.bytes = all;
    moment.textContent = cursor < 0 ? "nothing was allocated" : place(run, cursor);
    chips.forEach((chip, i) => {
      chip.dataset.bytes = sums[i];
      chip.title = `${exactBytes(sums[i])}, ${formatShare(sums[i], all) || "0 %"} of what is alive; click to show it alone`;
      chip.querySelector(".figure").textContent = formatBytes(sums[i]);
      chip.setAttribute("aria-pressed", String(chosen.has(i)));
      chip.classList.toggle("none", sums[i] === 0);
      chip.classList.toggle("off", chosen.size > 0 && !chosen.has(i));
    });
  });
  return h("div.cursor", {},
    h("p.readout", { role: "status", "aria-live": "polite" }, total, " ", moment),
    h("div.chips", { role: "group", "aria-label": "Categories at the cursor" }, chips));
}

function place(run, e) {
  const at = `event ${formatCount(run.events.seq[e])}, ${formatTime(run.events.ns[e])}`;
  return `${e === run.peakEvent ? "at the peak · " : ""}${at} · ${momentText(run, e)}`;
}

function toggle(store, category) {
  const chosen = new Set(store.state.chosen);
  if (!chosen.delete(category)) chosen.add(category);
  store.set({ chosen });
}

/** Moves keyboard users to a part of the page. */
export function focusOn(id) {
  byId(id)?.focus();
}
