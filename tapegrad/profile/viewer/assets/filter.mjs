// Which allocations the words in the search field, the chosen categories and the chosen group let through.

import { callText, shapeText } from "./describe.mjs";

/** The words of a query; "in quotes" is one word, with its blanks. */
export function words(query) {
  return [...query.matchAll(/"([^"]*)"?|(\S+)/g)].map((m) => (m[1] ?? m[2]).toLowerCase()).filter(Boolean);
}

export function lineKey({ file, line }) {
  return `${file}:${line}`;
}

/** key(allocation, category): equal for allocations of one group; "" for those that are in none. */
export function groupKeys(run, group) {
  const t = run.allocs, { stacks, calls } = run.tables;
  if (group === "op") return (a) => run.text(t.op[a]);
  if (group === "shape") return (a) => shapeText(run, a);
  if (group === "category") return (_, category) => run.categories[category];
  if (group === "call") {
    const names = Array.from(calls.name, (_, i) => callText(run, i));
    return (a) => names[t.call[a]] ?? "";
  }
  const lines = Array.from(stacks.frame, (_, i) => (run.frame(i) ? lineKey(run.frame(i)) : ""));
  return (a) => lines[t.stack[a]] ?? "";
}

/**
 * matches(allocation, category): whether every word of `query` is found in the allocation, its category is among those
 * chosen (none: all), and it is in the group `only` ({group, key}, or null).
 */
export function compile(run, { query, chosen, only }) {
  const found = words(query).map((word) => wordIn(run, word)), keys = only && groupKeys(run, only.group);
  return (a, category) =>
    (!chosen.size || chosen.has(category)) && (!only || keys(a, category) === only.key) && found.every((matches) => matches(a, category));
}

// The word is looked for once in every name, not once in every allocation.
function wordIn(run, word) {
  const t = run.allocs, has = (text) => text.toLowerCase().includes(word);
  const table = (count, textOf) => Uint8Array.from({ length: count }, (_, i) => (has(textOf(i)) ? 1 : 0));
  const strings = table(run.header.strings.length, (i) => run.header.strings[i]);
  const stacks = table(run.tables.stacks.frame.length, (i) => {
    const frame = run.frame(i);
    return frame ? `${frame.file}:${frame.line} ${frame.name}` : "";
  });
  const calls = table(run.tables.calls.name.length, (i) => callText(run, i));
  const categories = run.categories.map(has), phases = run.header.phases.map(has);
  return (a, category) =>
    strings[t.op[a]] || strings[t.shape[a]] || strings[t.dtype[a]] || strings[t.holder[a]] || stacks[t.stack[a]] ||
    calls[t.call[a]] || categories[category] || phases[t.phase[a]] || word === `#${t.number[a]}`;
}
