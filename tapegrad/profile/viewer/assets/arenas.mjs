// What lies in the arenas of captured programs over a call: a picture by category for each, and tables of its peak.

import { formatBytes, formatCount, formatShare, baseName, plural, visible } from "./format.mjs";
import { fitCanvas, h, themeColours } from "./dom.mjs";
import { table } from "./lineage.mjs";

const ARENA_HEIGHT = 96, MOST_ARENA_LINES = 20, MOST_ARENAS = 8; // CSS pixels; rows; programs

/** Captured programs with their arenas; null if none was replayed. */
export function arenasPanel(run, store) {
  const { arenas } = run.header;
  if (!arenas.length) return null;
  return h("section.panel", { id: "arenas", "aria-labelledby": "arenas-title" }, h("h2", { id: "arenas-title" }, "Arenas of captured programs"),
    h("p.hint", {}, "An arena is one allocation above. What is in it at each task of a call is the same in every replay."),
    arenas.slice(0, MOST_ARENAS).map((arena) => arenaView(run, store, arena)));
}

function arenaView(run, store, arena) {
  const place = (line) => visible(line.includes(":") ? baseName(line) : line);
  const canvas = h("canvas", { role: "img", "aria-label": `bytes in the arena of ${visible(arena.program)} over its tasks; the tables below give those of its peak` });
  const where = [arena.at < 0 ? "the start" : `task ${formatCount(arena.at + 1)} of ${formatCount(arena.tasks)}`, visible(arena.op), place(arena.line), arena.phase];
  store.watch(["size", "theme"], () => drawArena(canvas, run, arena));
  return h("div", {}, h("h3", {}, `${visible(arena.program)}: ${formatBytes(arena.bytes)}, ${plural(arena.replays, "replay")}`),
    h("p.readout", {}, arena.peak_bytes ? `most of it, ${formatBytes(arena.peak_bytes)}, is in use at ${where.filter(Boolean).join(", ")}` : "nothing lies in it"),
    h("div", { style: `height: ${ARENA_HEIGHT}px` }, canvas),
    table("In use then, by category", ["category", "bytes", "share", "values"], arena.categories.map((row) => [
      row.key, formatBytes(row.bytes), formatShare(row.bytes, arena.peak_bytes), formatCount(row.count)])),
    table("In use then, by line", ["line", "op", "category", "bytes", "share", "values"], arena.lines.slice(0, MOST_ARENA_LINES).map((row) => [
      place(row.key), visible(row.op), row.category, formatBytes(row.bytes), formatShare(row.bytes, arena.peak_bytes), formatCount(row.count)]), arena.lines.length));
}

function drawArena(canvas, run, arena) {
  const width = canvas.parentElement?.clientWidth ?? 0;
  if (!width) return;
  const context = fitCanvas(canvas, width, ARENA_HEIGHT), colours = themeColours(run.categories);
  const scale = ARENA_HEIGHT / Math.max(1, arena.bytes, arena.peak_bytes), step = width / Math.max(1, arena.tasks + 1);
  const live = run.categories.map(() => 0);
  for (let i = 0; i < arena.curve.length; ) {
    const task = arena.curve[i][0];
    for (; i < arena.curve.length && arena.curve[i][0] === task; i++) live[arena.curve[i][1]] += arena.curve[i][2];
    const end = i < arena.curve.length ? arena.curve[i][0] : arena.tasks;
    let top = ARENA_HEIGHT;
    live.forEach((bytes, category) => {
      if (bytes <= 0) return;
      context.fillStyle = colours.category[category];
      context.fillRect((task + 1) * step, top - bytes * scale, Math.max(1, (end - task) * step), bytes * scale);
      top -= bytes * scale;
    });
  }
}
