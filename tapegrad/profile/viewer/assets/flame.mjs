// A flame graph of what is alive at the cursor: bytes by call, inside the call that made it, and last by line.

import { h } from "./dom.mjs";
import { baseName, exactBytes, formatBytes, formatShare, visible } from "./format.mjs";

const LEAST_SHARE = 0.002; // of the width: what is narrower cannot be seen, and is left out

function flameNode(name, place, key) {
  return { name, place, key, bytes: 0, byCategory: new Map(), inside: new Map() };
}

/** The tree of what is alive after event `cursor`; equal calls in the same place are one. */
export function flameTree(run, cursor) {
  const { category, rest } = run.alive(cursor), root = flameNode("all that is alive", "", ""), paths = new Map();
  const add = (nodes, bytes, kind) => nodes.forEach((node) => {
    node.bytes += bytes;
    node.byCategory.set(kind, (node.byCategory.get(kind) ?? 0) + bytes);
  });
  for (let a = 0; a < category.length; a++) {
    if (category[a] < 0) continue;
    const nodes = pathOf(run, run.allocs.call[a], root, paths), frame = run.frame(run.allocs.stack[a]);
    const line = frame && childOf(nodes[nodes.length - 1], run.text(run.allocs.op[a]) || "(unnamed)", frame.file, frame.line);
    add(line ? [...nodes, line] : nodes, run.allocs.bytes[a], category[a]);
  }
  rest.forEach(({ bytes }, kind) => { if (bytes) add([root, childOf(root, "small allocations", "", 0)], bytes, kind); });
  return root;
}

// The nodes of a call and of all that it lies in.
function pathOf(run, call, root, paths) {
  if (call < 0) return [root];
  let path = paths.get(call);
  if (!path) {
    const { calls } = run.tables, outer = pathOf(run, calls.parent[call], root, paths);
    path = [...outer, childOf(outer[outer.length - 1], run.text(calls.name[call]), run.text(calls.file[call]), calls.line[call])];
    paths.set(call, path);
  }
  return path;
}

function childOf(node, name, file, line) {
  const key = `${name}\t${file}\t${line}`;
  let found = node.inside.get(key);
  if (!found) node.inside.set(key, (found = flameNode(name, file ? `${baseName(file)}:${line}` : "", `${node.key}\n${key}`)));
  return found;
}

export function flamePanel(run, store) {
  const picture = h("div", { id: "flame", role: "group", "aria-label": "bytes alive by call" }), back = h("button", { type: "button", onclick: () => store.set({ flame: "" }) }, "all that is alive");
  store.watch(["cursor", "flame"], ({ cursor, flame }) => {
    const root = flameTree(run, cursor), shown = flameNodeAt(root, flame) ?? root;
    back.hidden = shown === root;
    picture.replaceChildren(...flameRows(run, store, shown, root.bytes));
  });
  return h("section.panel", { "aria-labelledby": "flame-title" }, h("h2", { id: "flame-title" }, "Bytes by call"),
    h("p.hint", {}, "What is alive at the cursor, as wide as its bytes: each call lies in the one that made it, and lines in their call. A click widens one."), h("div.controls", {}, back), picture);
}

function flameNodeAt(root, key) {
  if (root.key === key) return root;
  for (const node of root.inside.values()) {
    const found = key === node.key || key.startsWith(`${node.key}\n`) ? flameNodeAt(node, key) : null;
    if (found) return found;
  }
  return null;
}

function flameRows(run, store, shown, total) {
  const found = [];
  const place = (node, left, depth) => {
    (found[depth] ??= []).push(flameBox(run, store, node, left / shown.bytes, node.bytes / shown.bytes, total));
    let at = left;
    for (const child of [...node.inside.values()].sort((a, b) => b.bytes - a.bytes || (a.key < b.key ? -1 : 1))) {
      if (child.bytes >= LEAST_SHARE * shown.bytes) place(child, at, depth + 1);
      at += child.bytes;
    }
  };
  if (shown.bytes) place(shown, 0, 0);
  return found.map((boxes) => h("div.flames", {}, boxes));
}

function flameBox(run, store, node, left, width, total) {
  const [most] = [...node.byCategory].sort((a, b) => b[1] - a[1])[0], what = `${visible(node.name)} ${visible(node.place)}`.trim();
  return h("button.flame", {
    type: "button", "data-bytes": node.bytes, "data-key": node.key, "data-category": run.categories[most], onclick: () => store.set({ flame: node.key }),
    style: `left: ${100 * left}%; width: ${100 * width}%`, title: `${what}: ${exactBytes(node.bytes)}, ${formatShare(node.bytes, total)}`,
  }, `${what} ${formatBytes(node.bytes)}`);
}
