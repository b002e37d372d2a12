// All that is known of the chosen allocation, with links to the ones it repeats and that repeat it.

import { h } from "./dom.mjs";
import { facts, linkText, numberText, opText } from "./describe.mjs";
import { moveCursor } from "./cursor.mjs";

const MOST_LINKS = 12;

export function detailsPanel(run, store) {
  const body = h("div", { id: "details" });
  store.watch(["selected", "cursor"], ({ selected, cursor }) => {
    body.replaceChildren(...(selected < 0 ? [h("p.hint", {}, "Choose a rectangle or a row to see all that is known of it.")] : content(run, store, selected, cursor)));
  });
  return h("section.panel", { "aria-labelledby": "details-title" }, h("h2", { id: "details-title" }, "Allocation"), body);
}

function content(run, store, a, cursor) {
  const category = run.alive(cursor).category[a];
  const go = (text, event) => h("button", { type: "button", onclick: () => moveCursor(store, run, event) }, text);
  const link = (b) => h("li", {}, h("button.link", { type: "button", onclick: () => choose(run, store, b) }, linkText(run, b)));
  const old = run.allocs.remat_of[a], later = run.repeats.get(a) ?? [];
  return [
    h("p.title", {}, `${opText(run, a)} `, h("span.muted", {}, numberText(run, a) + (category < 0 ? ", not alive at the cursor" : ""))),
    h("dl", {}, facts(run, a, category).filter(([k]) => !k.startsWith("repeat")).flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v)])),
    old >= 0 ? h("div", {}, h("h3", {}, "Repeats the value of"), h("ul.links", {}, link(old))) : null,
    later.length ? h("div", {}, h("h3", {}, `Computed again ${later.length === 1 ? "once" : `${later.length} times`}`), h("ul.links", {}, later.slice(0, MOST_LINKS).map(link))) : null,
    h("p.actions", {}, go("go to its begin", run.begin[a]), run.end[a] < run.count ? go("go to its end", run.end[a]) : null),
  ].filter(Boolean);
}

/** Chooses an allocation and moves the cursor to where it begins. */
export function choose(run, store, a) {
  store.set({ selected: a });
  moveCursor(store, run, run.begin[a]);
}
