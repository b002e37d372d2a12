// The table of what is alive at the cursor: one by one or in groups, sorted, filtered.

import { h } from "./dom.mjs";
import { functionText, numberText, opText, placeText, shapeText } from "./describe.mjs";
import { compile, groupKeys } from "./filter.mjs";
import { exactBytes, formatBytes, formatCount, formatShare, formatTime, plural, visible } from "./format.mjs";

export const GROUPS = ["allocation", "line", "op", "call", "shape", "category"];
const PAGE = 200; // rows shown before one asks for more

const NO_NAME = { line: "line not recorded", op: "unnamed", call: "outside calls", shape: "unknown" };

const text = (name, label, of) => ({ name, label, of, compare: (a, b) => a[name].localeCompare(b[name]) });
const number = (name, label, of) => ({ name, label, of, number: true, compare: (a, b) => a[name] - b[name] });
const bytes = number("bytes", "bytes", (row) => formatBytes(row.bytes));
const COLUMNS = {
  allocation: [bytes, text("category", "category"), text("op", "op"), text("line", "line"), text("shape", "array"), text("holder", "held by"),
    number("idle", "idle", (row) => (row.idle < 0 ? "" : formatTime(row.idle)))],
  group: [bytes, number("share", "share", (row) => row.shareText), number("count", "n", (row) => formatCount(row.count)), text("name", "name"), text("mix", "category")],
};

/** Rows of what is alive after event `cursor` and passes the filter, and the sums of both. */
export function tableRows(run, state) {
  const { cursor, query, chosen, only, group } = state;
  const { category, rest } = run.alive(cursor), matches = compile(run, state), total = run.total(cursor);
  const members = [];
  for (let a = 0; a < category.length; a++) if (category[a] >= 0 && matches(a, category[a])) members.push(a);
  const rows = group === "allocation" ? members.map((a) => single(run, a, category[a])) : groups(run, members, category, group, total);
  if (!query && !only) rows.push(...folded(run, rest, chosen, total));
  return { rows, total, shown: rows.reduce((sum, row) => sum + row.bytes, 0), count: rows.reduce((sum, row) => sum + row.count, 0) };
}

function single(run, a, category) {
  const t = run.allocs;
  return {
    alloc: a, count: 1, bytes: t.bytes[a], category: run.categories[category], op: opText(run, a), idle: run.idle(a),
    line: lineText(run, a), shape: shapeText(run, a), holder: visible(run.text(t.holder[a])),
  };
}

function groups(run, members, category, group, total) {
  const found = new Map(), keys = groupKeys(run, group);
  for (const a of members) {
    const key = keys(a, category[a]);
    let row = found.get(key);
    if (!row) found.set(key, (row = { alloc: -1, only: { group, key }, bytes: 0, count: 0, name: groupName(run, group, key, a), parts: new Map() }));
    row.bytes += run.allocs.bytes[a];
    row.count++;
    row.parts.set(category[a], (row.parts.get(category[a]) ?? 0) + run.allocs.bytes[a]);
  }
  return [...found.values()].map((row) => finish(run, row, total));
}

function groupName(run, group, key, a) {
  if (!key) return NO_NAME[group];
  return group === "line" ? lineText(run, a) : visible(key);
}

function lineText(run, a) {
  return `${placeText(run, run.allocs.stack[a])} ${functionText(run, run.allocs.stack[a])}`.trim();
}

function finish(run, row, total) {
  const parts = [...row.parts].sort((a, b) => b[1] - a[1]);
  const share = total > 0 ? row.bytes / total : 0;
  return { ...row, share, shareText: formatShare(row.bytes, total), mix: parts.map(([c]) => run.categories[c]).join(", "), category: run.categories[parts[0][0]] };
}

// Allocations too small to be listed one by one still count.
function folded(run, rest, chosen, total) {
  return rest.flatMap(({ bytes: sum, count }, i) => {
    if (!count || (chosen.size && !chosen.has(i))) return [];
    const name = `${plural(count, "smaller allocation")}, not listed one by one`;
    const row = finish(run, { alloc: -1, bytes: sum, count, name, parts: new Map([[i, sum]]) }, total);
    return [{ ...row, op: name, line: "", shape: "", holder: "", idle: -1 }];
  });
}

export function tablePanel(run, store) {
  const search = h("input", { id: "filter", type: "search", placeholder: "op, line, call, shape …   ( / )", "aria-label": "Filter what is alive", autocomplete: "off", spellcheck: "false",
    oninput: () => store.set({ query: search.value }) });
  const select = h("select", { id: "group", "aria-label": "Group by", onchange: () => store.set({ group: select.value, rows: PAGE }) }, GROUPS.map((g) => h("option", { value: g }, g)));
  const table = h("table", { id: "alive" }), more = h("button", { type: "button", id: "more", onclick: () => store.set({ rows: store.state.rows + 10 * PAGE }) });
  const summary = h("p.summary", {}), save = h("button", { type: "button", onclick: () => saveCsv(run, store.state) }, "save as CSV");
  const only = h("button.only", { type: "button", id: "only", title: "show all again (Esc)", onclick: () => store.set({ only: null }) });
  store.watch(["cursor", "query", "chosen", "only", "group", "sort", "rows", "selected"], (state) => {
    if (search.value !== state.query) search.value = state.query;
    select.value = state.group;
    only.hidden = !state.only;
    only.textContent = state.only ? `${state.only.group} ${state.only.name} ✕` : "";
    const found = tableRows(run, state);
    drawTable(run, store, table, found, state);
    more.hidden = found.rows.length <= state.rows;
    more.textContent = `show more (${formatCount(Math.max(found.rows.length - state.rows, 0))} rows left)`;
    summary.replaceChildren(...sums(found));
  });
  return h("section.panel", { "aria-labelledby": "alive-title" }, h("h2", { id: "alive-title" }, "Alive at the cursor"),
    h("div.controls", {}, search, only, h("label", {}, "by ", select), save), summary, h("div.scroll", { tabindex: "0", role: "region", "aria-label": "Table of what is alive" }, table, more));
}

function sums({ total, shown, count }) {
  const all = h("strong", { id: "alive-total", "data-bytes": total, title: exactBytes(total) }, formatBytes(total));
  const part = h("span", { id: "alive-shown", "data-bytes": shown, title: exactBytes(shown) }, `${formatBytes(shown)} in ${plural(count, "allocation")} shown`);
  return [all, ` (${exactBytes(total)}) alive · `, part];
}

function drawTable(run, store, table, { rows }, state) {
  const columns = columnsOf(state, rows);
  const by = columns.find((c) => c.name === state.sort.by) ?? bytes;
  rows.sort((a, b) => state.sort.direction * by.compare(a, b) || b.bytes - a.bytes);
  const largest = rows.reduce((most, row) => Math.max(most, row.bytes), 1);
  table.replaceChildren(
    h("thead", {}, h("tr", {}, columns.map((c) => heading(store, c, by, state)))),
    h("tbody", {}, rows.slice(0, state.rows).map((row) => bodyRow(run, store, row, columns, largest, state))));
}

// What is known of no row gets no column.
function columnsOf(state, rows) {
  return COLUMNS[state.group === "allocation" ? "allocation" : "group"].filter(
    ({ name }) => (name !== "holder" && name !== "idle") || rows.some((row) => row[name] !== "" && row[name] !== -1),
  );
}

function heading(store, column, by, state) {
  const sorted = column.name === by.name ? (state.sort.direction > 0 ? "ascending" : "descending") : "none";
  const direction = sorted === "none" ? (column.number ? -1 : 1) : -state.sort.direction;
  return h(column.number ? "th.number" : "th", { scope: "col", "aria-sort": sorted },
    h("button", { type: "button", "data-sort": column.name, onclick: () => store.set({ sort: { by: column.name, direction } }) }, column.label));
}

function bodyRow(run, store, row, columns, largest, state) {
  const chosen = row.alloc >= 0 && row.alloc === state.selected;
  const cells = columns.map((c) => {
    const shown = c.of ? c.of(row) : row[c.name];
    if (c.name === "bytes") return h("td.number.bar", { title: exactBytes(row.bytes), style: `--share: ${(100 * row.bytes) / largest}%; --bar: var(--${row.category})` }, shown);
    if (c.name === "category" || c.name === "mix") return h(c.name === "mix" ? "td.c-mix" : "td.c-category", {}, h("span.swatch", { style: `background: var(--${row.category})` }), shown);
    if (c.name === "op" || c.name === "name") return h(`td.c-${c.name}`, {}, opener(run, store, row, shown));
    return h(c.number ? "td.number" : `td.c-${c.name}`, { title: c.name === "line" && row.alloc >= 0 ? placeText(run, run.allocs.stack[row.alloc], true) : null }, shown);
  });
  return h(chosen ? "tr.chosen" : "tr", { "data-bytes": row.bytes, "data-alloc": row.alloc >= 0 ? run.allocs.number[row.alloc] : null, "data-count": row.count,
    onclick: row.alloc >= 0 ? () => store.set({ selected: row.alloc }) : null }, cells);
}

// The button in a row: chooses an allocation, or lists the members of a group.
function opener(run, store, row, shown) {
  if (row.alloc >= 0) return h("button.link", { type: "button", title: numberText(run, row.alloc), onclick: () => store.set({ selected: row.alloc }) }, shown);
  if (!row.only) return shown;
  const members = row.only.group === "category" ? { chosen: new Set([run.categories.indexOf(row.only.key)]) } : { only: { ...row.only, name: row.name } };
  return h("button.link", { type: "button", title: "list its allocations", onclick: () => store.set({ group: "allocation", rows: PAGE, ...members }) }, shown);
}

function saveCsv(run, state) {
  const { rows } = tableRows(run, state), columns = COLUMNS[state.group === "allocation" ? "allocation" : "group"];
  const cell = (value) => (/[",\n\r]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value));
  const lines = [columns.map((c) => c.label), ...rows.map((row) => columns.map((c) => row[c.name]))].map((cells) => cells.map(cell).join(","));
  const url = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
  h("a", { href: url, download: "alive.csv" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
