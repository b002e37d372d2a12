// What was computed again: which calls were rerun, how long that took, and which values came back.

import { reruns } from "./calls.mjs";
import { h } from "./dom.mjs";
import { choose } from "./details.mjs";
import { opText, placeText, shapeText } from "./describe.mjs";
import { baseName, exactBytes, formatBytes, formatCount, formatTime, plural, visible } from "./format.mjs";

const MOST = 50;

/** Values computed again, by what they repeat. */
export function repeatedValues(run) {
  const { remat_of: of, stack, op, shape, bytes } = run.allocs, found = new Map();
  of.forEach((old, a) => {
    if (old < 0) return;
    const key = `${op[old]} ${stack[old]} ${shape[a]}`;
    if (!found.has(key)) found.set(key, { old, first: a, count: 0, bytes: 0, ns: 0 });
    const row = found.get(key);
    row.count++;
    row.bytes += bytes[a];
  });
  return [...found.values()].sort((a, b) => b.bytes - a.bytes);
}

export function lineagePanel(run, store) {
  const calls = reruns(run), values = repeatedValues(run);
  if (!calls.length && !values.length) return null;
  const ns = calls.reduce((sum, row) => sum + row.ns, 0), times = calls.reduce((sum, row) => sum + row.count, 0);
  const bytes = values.reduce((sum, row) => sum + row.bytes, 0);
  return h("section.panel", { id: "lineage", "aria-labelledby": "lineage-title" }, h("h2", { id: "lineage-title" }, "Computed again"),
    h("p.summary", {}, h("strong", {}, plural(times, "rerun")), ` in ${formatTime(ns)} brought back ${formatBytes(bytes)} (${exactBytes(bytes)})`),
    h("div.beside", {}, calls.length ? rerunTable(run, calls) : null, values.length ? valueTable(run, store, values) : null));
}

function rerunTable(run, calls) {
  const steps = Math.max(run.tables.steps.begin_seq.length, 1);
  return table("Reruns", ["call", "defined at", "times", "ms", "ms per step"], calls.slice(0, MOST).map((row) => [
    visible(row.name), row.file ? `${visible(baseName(row.file))}:${row.line}` : "", formatCount(row.count), (row.ns / 1e6).toFixed(2), (row.ns / 1e6 / steps).toFixed(2),
  ]), calls.length);
}

function valueTable(run, store, values) {
  return table("Values", ["value", "line", "array", "times", "bytes"], values.slice(0, MOST).map((row) => [
    h("button.link", { type: "button", title: "go to the first time", onclick: () => choose(run, store, row.first) }, opText(run, row.old)),
    placeText(run, run.allocs.stack[row.old]), shapeText(run, row.first), formatCount(row.count), formatBytes(row.bytes),
  ]), values.length);
}

/** A plain table; of columns named in NUMBERS the figures stand to the right. */
export function table(caption, heads, rows, all = rows.length) {
  const kinds = heads.map((head) => (NUMBERS.has(head) ? ".number" : ""));
  return h("div.scroll", {}, h("table.plain", {}, h("caption", {}, all > rows.length ? `${caption}: the first ${rows.length} of ${formatCount(all)}` : caption),
    h("thead", {}, h("tr", {}, heads.map((head, i) => h(`th${kinds[i]}`, { scope: "col" }, head)))),
    h("tbody", {}, rows.map((cells) => h("tr", {}, cells.map((cell, i) => h(`td${kinds[i]}`, {}, cell)))))));
}

const NUMBERS = new Set(["times", "ms", "ms per step", "bytes", "peak", "change of peak", "step", "slowdown", "rank", "time", "bytes sent", "waited",
  "waited for by others", "calls", "share", "values", "for others", "transfer", "exposed", "hidden"]);
