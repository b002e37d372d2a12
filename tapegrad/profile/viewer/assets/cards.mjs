// What would help: cards with what to write at which lines, as they were found when the report was written.

import { byId, h } from "./dom.mjs";
import { baseName, exactBytes, formatBytes, visible } from "./format.mjs";

/** The lines of the program that cards speak of: `file` and a tab, `line`. */
export function advisedLines(run) {
  const cards = run.header.advice?.cards ?? [];
  return new Set(cards.flatMap((card) => card.edits.map(({ file, line }) => `${file}\t${line}`)));
}

/** The panel; null where nothing would help. */
export function cardsPanel(run, store) {
  const { cards = [], commands = [] } = run.header.advice ?? {};
  if (!cards.length && !commands.length) return null;
  return h("section.panel", { id: "advice", "aria-labelledby": "advice-title" }, h("h2", { id: "advice-title" }, "What would help"),
    cards.length ? h("div.cards", {}, cards.map((card) => cardOf(store, card))) : null,
    commands.map(([what, command]) => h("p.command", {}, `${visible(what)}: `, h("code", {}, visible(command)))));
}

function cardOf(store, { what, before_bytes: before, after_bytes: after, work, bound, edits }) {
  const less = before ? `, −${((100 * (before - after)) / before).toFixed(0)} %` : "";
  const code = edits.map((edit) => edit.new).filter(Boolean).join("\n");
  return h("article.card", {},
    h("p.effect", { title: `${exactBytes(before)} → ${exactBytes(after)}`, "data-bytes": after, "data-before": before },
      h("strong", {}, `${formatBytes(before)} → ${bound ? `${bound} ` : ""}${formatBytes(after)}`), `${less} · work +${(100 * work).toFixed(0)} %`),
    h("p", {}, visible(what)),
    edits.map((edit) => editOf(store, edit)),
    code ? copyButton(code) : null);
}

function editOf(store, { file, line, old, new: text }) {
  const place = h("button.link", { type: "button", title: visible(file), onclick: () => showLine(store, file, line) }, `${visible(baseName(file))}:${line}`);
  return h("div.edit", {}, place, old ? h("del", {}, h("code", {}, visible(old))) : text ? h("span.hint", {}, "above it") : null,
    text ? h("ins", {}, h("code", {}, visible(text))) : null);
}

function showLine(store, file, line) {
  store.set({ file, line });
  byId("source").scrollIntoView({ block: "nearest" });
}

function copyButton(text) {
  const button = h("button", { type: "button", title: "copy what is to be written", onclick: () => copyText(text).then((done) => {
    button.textContent = done ? "copied" : "select it and press Ctrl-C";
    setTimeout(() => { button.textContent = "copy"; }, 2000);
  }) }, "copy");
  return h("p.actions", {}, button);
}

// A page from a file may not be let to the clipboard; then the old way may still work.
async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = h("textarea", { "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
