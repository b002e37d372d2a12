// The lines of the program that allocated, each with a bar of the bytes it has alive at the cursor.

import { advisedLines } from "./cards.mjs";
import { h } from "./dom.mjs";
import { lineKey } from "./filter.mjs";
import { baseName, exactBytes, formatBytes, visible } from "./format.mjs";

/** Bytes alive after event `cursor` by file and line. */
export function bytesByLine(run, cursor) {
  const { category } = run.alive(cursor), files = new Map();
  for (let a = 0; a < category.length; a++) {
    const frame = category[a] >= 0 ? run.frame(run.allocs.stack[a]) : null;
    if (!frame) continue;
    const lines = files.get(frame.file) ?? files.set(frame.file, new Map()).get(frame.file);
    lines.set(frame.line, (lines.get(frame.line) ?? 0) + run.allocs.bytes[a]);
  }
  return files;
}

export function sourcePanel(run, store) {
  const select = h("select", { id: "file", "aria-label": "File", onchange: () => store.set({ file: select.value }) });
  const body = h("div.code", { id: "source", tabindex: "0", role: "region", "aria-label": "Source lines" });
  store.watch(["selected"], ({ selected }) => {
    const frame = selected >= 0 ? run.frame(run.allocs.stack[selected]) : null;
    if (frame) store.set({ file: frame.file, line: 0 });
  });
  const advised = advisedLines(run);
  store.watch(["cursor", "file", "line", "selected"], (state) => {
    const files = bytesByLine(run, state.cursor), names = fileNames(run, files);
    const file = names.includes(state.file) ? state.file : names[0];
    select.hidden = !names.length;
    select.replaceChildren(...names.map((name) => h("option", { value: name, selected: name === file }, `${visible(baseName(name))} · ${formatBytes(sum(files.get(name)))}`)));
    select.title = file === undefined ? "" : visible(file);
    body.replaceChildren(...(file === undefined ? [h("p.hint", {}, "No line of the program was recorded.")] : code(run, store, file, files.get(file) ?? new Map(), advised, state)));
    body.querySelector(".shown")?.scrollIntoView({ block: "nearest" });
  });
  const note = run.header.sources ? null : h("p.hint", {}, "The text of the lines was left out of this report.");
  return h("section.panel", { "aria-labelledby": "source-title" }, h("h2", { id: "source-title" }, "Source"), h("div.controls", {}, select), note, body);
}

// Files with the most bytes alive first; then the others whose lines are known.
function fileNames(run, files) {
  const all = new Set([...files.keys(), ...Object.keys(run.header.sources ?? {})]);
  return [...all].sort((a, b) => sum(files.get(b)) - sum(files.get(a)) || (a < b ? -1 : 1));
}

function sum(lines) {
  return lines ? [...lines.values()].reduce((total, bytes) => total + bytes, 0) : 0;
}

function code(run, store, file, lines, advised, state) {
  const texts = run.header.sources?.[file] ?? {};
  const numbers = [...new Set([...Object.keys(texts).map(Number), ...lines.keys()])].sort((a, b) => a - b);
  const most = Math.max(1, ...lines.values()), total = run.total(state.cursor);
  const chosen = state.selected >= 0 ? run.frame(run.allocs.stack[state.selected]) : null;
  return numbers.flatMap((number, i) => {
    const classes = [
      chosen?.file === file && chosen.line === number ? ".chosen" : "", advised.has(`${file}\t${number}`) ? ".advised" : "",
      state.file === file && state.line === number ? ".shown" : "",
    ].join("");
    const row = line(store, file, number, texts[number], lines.get(number) ?? 0, most, total, classes);
    return i && number !== numbers[i - 1] + 1 ? [h("div.gap", { "aria-hidden": "true" }, "⋯"), row] : [row];
  });
}

function line(store, file, number, text, bytes, most, total, classes) {
  const share = total > 0 ? `, ${((100 * bytes) / total).toFixed(1)} % of what is alive` : "";
  return h(`div.line${classes}`, { "data-line": number, "data-bytes": bytes, title: `${exactBytes(bytes)}${share}` },
    h("span.gutter", { style: `--share: ${(100 * bytes) / most}%` }, bytes ? formatBytes(bytes) : ""),
    h("button.link", { type: "button", "aria-label": `filter by line ${number}`, onclick: () => store.set({ only: { group: "line", key: lineKey({ file, line: number }), name: `${visible(baseName(file))}:${number}` } }) }, String(number)),
    h("code", {}, text === undefined ? "" : visible(text)));
}
