// Several ranks: a lane of each over the time axis, and the tables of ranks and of collectives.

import { formatBytes, formatCount, formatTime, baseName, visible } from "./format.mjs";
import { h, themeColours } from "./dom.mjs";
import { table } from "./lineage.mjs";
import { Plot } from "./plot.mjs";

const RANK_LANE = 30, WAIT_BAR = 12, WAY_BAR = 6; // CSS pixels: of a lane, of what the program stands still for, of what is under way
const MOST_LINES = 50;

/** The ranks of the job with their lanes; null for a program alone. */
export function ranksPanel(run, store) {
  const { ranks, communication } = run.header;
  if (ranks.length < 2) return null;
  const lanes = new Lanes(run, store, ranks.map((row) => row.rank));
  const swatch = (style, text) => h("span.legend", {}, h("span.swatch", { style: `background: var(--${style})` }), text);
  const place = (row) => (row.file ? `${visible(baseName(row.file))}:${row.line}` : "");
  return h("section.panel", { id: "ranks", "aria-labelledby": "ranks-title" }, h("h2", { id: "ranks-title" }, "Ranks"),
    h("p.hint", {}, `What is shown of memory is of rank ${run.header.meta.rank ?? 0}, whose peak is the highest. `, swatch("band-backward", "gradient walk"), swatch("bad", "waits for other ranks"),
      swatch("accent", "waits for bytes"), swatch("communication", "bytes under way meanwhile")),
    lanes.plot.element, lanes.readout,
    table("Each rank", ["rank", "peak", "time", "bytes sent", "waited", "waited for by others"], ranks.map((row) => [
      String(row.rank), formatBytes(row.peak_bytes), formatTime(row.ns), formatBytes(row.sent_bytes), formatTime(row.waited_ns), formatTime(row.delayed_ns)])),
    table("Collectives, for a rank on average", ["kind", "line", "calls", "bytes", "for others", "transfer", "exposed", "hidden"], communication.slice(0, MOST_LINES).map((row) => [
      visible(row.kind) + (row.unfinished ? ` (${row.unfinished} not done)` : ""), place(row), formatCount(row.calls), formatBytes(row.bytes),
      formatTime(row.others_ns), formatTime(row.transfer_ns), formatTime(row.exposed_ns), formatTime(row.hidden_ns)]), communication.length));
}

class Lanes {
  constructor(run, store, ranks) {
    Object.assign(this, { run, store, ranks });
    this.row = new Map(ranks.map((rank, i) => [rank, i]));
    this.plot = new Plot(run, store, {
      top: 4, bottom: 4, height: 8 + RANK_LANE * ranks.length,
      attributes: { id: "lanes", role: "img", "aria-label": "When each rank walked back, waited and communicated; the tables below give the sums" },
    });
    this.readout = h("p.readout", { id: "lane-readout" });
    this.plot.handlers = { move: (x, y) => this.#tell(x, y), leave: () => this.readout.replaceChildren() };
    store.watch(["axis", "range", "size", "theme"], (state, changed) => {
      if (changed.has("theme") || !this.colours) this.colours = themeColours(run.categories);
      this.#draw(state);
    });
    store.watch(["axis", "range", "size", "theme", "cursor"], () => this.plot.drawCursor(this.plot.beginAbove(), this.colours));
  }

  // Ranks have the time in common, and nothing else: another axis shows the whole run.
  #draw({ axis }) {
    const { plot, run, colours } = this, context = plot.begin();
    plot.xs = run.xs.time;
    if (axis !== "time") plot.range = run.spans.time;
    context.textBaseline = "middle";
    context.fillStyle = colours.muted;
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "right";
    for (const rank of this.ranks) context.fillText(`rank ${rank}`, plot.left - 8, this.#top(rank) + RANK_LANE / 2);
    context.save();
    context.beginPath();
    context.rect(plot.left, 0, plot.inner, plot.height);
    context.clip();
    this.#walks(context);
    this.#events(context);
    context.restore();
  }

  #top(rank) {
    return this.plot.top + RANK_LANE * this.row.get(rank);
  }

  #bar(context, colour, rank, from, to, at, height) {
    const { plot } = this, [begin, end] = plot.range;
    if (to < begin || from > end) return;
    const left = plot.px(Math.max(from, begin)), right = plot.px(Math.min(to, end));
    context.fillStyle = colour;
    context.fillRect(left, this.#top(rank) + at, Math.max(right - left, 0.75), height);
  }

  #walks(context) {
    const { rank, begin_ns, end_ns } = this.run.tables.walks;
    for (let i = 0; i < rank.length; i++) if (this.row.has(rank[i])) this.#bar(context, this.colours.phase[1], rank[i], begin_ns[i], end_ns[i], 3, RANK_LANE - 6);
  }

  #events(context) {
    const { rank, begin, last, end, exposed, under_way } = this.run.tables.lanes, { colours, run } = this;
    const way = colours.category[run.categories.indexOf("communication")];
    for (let i = 0; i < rank.length; i++) {
      if (under_way[i]) this.#bar(context, way, rank[i], begin[i], end[i], RANK_LANE - WAY_BAR - 4, WAY_BAR);
      const waits = end[i] - exposed[i];
      if (!exposed[i]) continue;
      if (last[i] > waits) this.#bar(context, colours.bad, rank[i], waits, last[i], 4, WAIT_BAR);
      this.#bar(context, colours.accent, rank[i], Math.max(waits, last[i]), end[i], 4, WAIT_BAR);
    }
  }

  /** The collective at a point: the shortest of those there. */
  at(x, y) {
    const { plot, run } = this, { rank, begin, end } = run.tables.lanes, row = Math.floor((y - plot.top) / RANK_LANE);
    const near = (plot.range[1] - plot.range[0]) / plot.inner, t = plot.at(x);
    let best = -1;
    for (let i = 0; i < rank.length; i++) {
      if (this.row.get(rank[i]) !== row || begin[i] - near > t || end[i] + near < t) continue;
      if (best < 0 || end[i] - begin[i] < end[best] - begin[best]) best = i;
    }
    return best;
  }

  #tell(x, y) {
    const i = this.plot.brush ? -1 : this.at(x, y), { lanes } = this.run.tables;
    if (i < 0) { this.readout.replaceChildren(); return; }
    const others = lanes.last[i] - lanes.begin[i], took = lanes.end[i] - lanes.begin[i], file = this.run.text(lanes.file[i]);
    const where = file ? ` at ${visible(baseName(file))}:${lanes.line[i]}` : "";
    this.readout.replaceChildren(`rank ${lanes.rank[i]}: ${visible(this.run.text(lanes.kind[i]))}${where}, ${formatBytes(lanes.bytes[i])}: ${formatTime(others)} for others, ` +
      `${formatTime(took - others)} transfer; ${formatTime(lanes.exposed[i])} exposed, ${formatTime(took - lanes.exposed[i])} hidden`);
  }
}
