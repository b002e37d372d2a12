// One key for each thing one does often.  They work everywhere but in fields one types into.

import { h } from "./dom.mjs";

const HELP = [
  ["← →", "cursor to the event before, after"], ["Shift ← →", "cursor by a fiftieth of what is shown"], ["Home End", "first, last event"],
  ["p", "peak"], ["o", "failure for want of memory"], ["[ ]", "peak of the step before, after"], ["+ − 0", "zoom in, out, whole run"],
  ["x", "x axis: time, event, operation"], ["/", "filter"], ["g", "group the table by something else"], ["t", "light or dark"], ["?", "this help"], ["Esc", "close, or clear the filter"],
];
const MOUSE = [["click", "moves the cursor"], ["drag", "zooms to the range"], ["Ctrl wheel", "zooms"], ["sideways wheel", "moves along the run"], ["double click", "whole run"]];

const KEYS = {
  ArrowLeft: "eventBefore", ArrowRight: "eventAfter", Home: "first", End: "last", p: "peak", o: "oom", "[": "stepBefore", "]": "stepAfter",
  "+": "zoomIn", "=": "zoomIn", "-": "zoomOut", 0: "whole", x: "nextAxis", "/": "filter", g: "nextGroup", t: "theme", "?": "help",
};

export function listenToKeys(actions) {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("dialog[open]")) return; // one that closes may have the focus still
    if (event.key === "Escape") return void actions.escape();
    if (event.target.closest("input[type=search], select")) return;
    const name = KEYS[event.key];
    if (!name) return;
    // Arrows choose among radio buttons, and scroll a table; Home and End scroll.
    if (event.key.length > 1 && event.target.closest("input, .scroll, .code")) return;
    event.preventDefault();
    actions[event.shiftKey && name.startsWith("event") ? `${name}Far` : name]();
  });
}

export function helpDialog() {
  const rows = (list) => h("dl", {}, list.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]));
  return h("dialog", { id: "help", "aria-label": "Keys" }, h("h2", {}, "Keys"), rows(HELP), h("h2", {}, "Mouse, on the pictures"), rows(MOUSE),
    h("form", { method: "dialog" }, h("button", {}, "close")));
}
