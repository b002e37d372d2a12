// The run: what was alive after each of its events, and where each event lies on each of the three x axes.
//
// An event e is one entry of the table "events"; e === -1 stands for the moment before the first.

import { countUpTo } from "./axis.mjs";
import { shownCalls } from "./calls.mjs";

const BLOCK = 64; // sums by category are kept after every so many events and replayed in between

export const AXES = ["time", "event", "op"];

export class Run {
  constructor({ header, tables }) {
    this.header = header;
    this.tables = tables;
    this.allocs = tables.allocs;
    this.events = tables.events;
    this.count = tables.events.seq.length;
    this.allocCount = tables.allocs.bytes.length;
    this.categories = header.categories;
    this.#replayAll();
    this.#placeEvents();
    this.peakEvent = this.eventAt(header.peak.seq);
    this.repeats = this.#repeats();
    this.shownCalls = shownCalls(this);
  }

  // One pass over all events: totals, sums by category every BLOCK events, and the span in which each allocation
  // served as one category (a segment), which is what the strips draw.
  #replayAll() {
    const { alloc, change } = this.events;
    const kinds = this.categories.length, sums = new Float64Array(kinds), n = this.count;
    this.totals = new Float64Array(n);
    this.blocks = new Float64Array((Math.floor(n / BLOCK) + 1) * kinds);
    this.begin = new Int32Array(this.allocCount).fill(n);
    this.end = new Int32Array(this.allocCount).fill(n);
    this.segments = { alloc: new Int32Array(n), category: new Int8Array(n), begin: new Int32Array(n), end: new Int32Array(n), count: 0 };
    const open = new Int32Array(this.allocCount).fill(-1);
    let total = 0;
    for (let e = 0; e < n; e++) {
      if (e % BLOCK === 0) this.blocks.set(sums, (e / BLOCK) * kinds);
      const a = alloc[e], before = (change[e] >> 4) - 1, after = (change[e] & 15) - 1, size = this.#size(e);
      if (before >= 0) { sums[before] -= size; total -= size; }
      if (after >= 0) { sums[after] += size; total += size; }
      this.totals[e] = total;
      if (a >= 0) this.#segment(open, a, e, before, after);
    }
    if (n % BLOCK === 0) this.blocks.set(sums, (n / BLOCK) * kinds);
  }

  #segment(open, a, e, before, after) {
    const s = this.segments;
    if (open[a] >= 0) s.end[open[a]] = e;
    open[a] = -1;
    if (before < 0) this.begin[a] = e;
    if (after < 0) { this.end[a] = e; return; }
    open[a] = s.count++;
    s.alloc[open[a]] = a;
    s.category[open[a]] = after;
    s.begin[open[a]] = e;
    s.end[open[a]] = this.count;
  }

  #size(e) {
    const a = this.events.alloc[e];
    return a >= 0 ? this.allocs.bytes[a] : this.events.folded[e];
  }

  // xs[axis][e] is where event e lies; one more entry is the end of the run.  Clocks may repeat, never go back here.
  #placeEvents() {
    const { events, tables, count: n } = this, ops = tables.ops, marks = tables.marks, steps = tables.steps;
    const lastOf = (...columns) => columns.reduce((most, c) => Math.max(most, c.length ? c[c.length - 1] : 0), 0);
    this.xs = {};
    this.xs.event = extended(events.seq, lastOf(events.seq, ops.seq, marks.seq, steps.end_seq) + 1);
    this.xs.time = extended(events.ns, lastOf(events.ns, ops.ns, marks.ns, steps.end_ns));
    this.xs.op = extended(events.seq.map((seq) => countUpTo(ops.seq, seq)), ops.seq.length + 1);
    this.spans = {};
    for (const axis of AXES) {
      const from = n ? this.xs[axis][0] : 0, to = this.xs[axis][n];
      this.spans[axis] = [from, Math.max(to, from + 1)];
    }
  }

  /** Where a moment, given as number and clock, lies on an axis. */
  place(axis, seq, ns) {
    if (axis === "time") return ns;
    return axis === "event" ? seq : countUpTo(this.tables.ops.seq, seq);
  }

  /** The last event up to the moment numbered seq. */
  eventAt(seq) {
    return countUpTo(this.events.seq, seq) - 1;
  }

  total(e) {
    return e < 0 ? 0 : this.totals[e];
  }

  /** Bytes by category after event e. */
  sums(e) {
    const kinds = this.categories.length, block = Math.floor((e + 1) / BLOCK);
    const sums = this.blocks.slice(block * kinds, (block + 1) * kinds);
    for (let i = block * BLOCK; i <= e; i++) {
      const change = this.events.change[i], size = this.#size(i);
      if (change >> 4) sums[(change >> 4) - 1] -= size;
      if (change & 15) sums[(change & 15) - 1] += size;
    }
    return sums;
  }

  /** The category of each allocation after event e (-1: not alive), and what is alive of those not listed one by one. */
  alive(e) {
    if (this.lastAlive?.event !== e) this.lastAlive = { event: e, ...this.#alive(e) }; // several parts of the page ask
    return this.lastAlive;
  }

  #alive(e) {
    const { alloc, change, folded } = this.events;
    const category = new Int8Array(this.allocCount).fill(-1);
    const rest = this.categories.map(() => ({ bytes: 0, count: 0 }));
    for (let i = 0; i <= e; i++) {
      const a = alloc[i], before = (change[i] >> 4) - 1, after = (change[i] & 15) - 1;
      if (a >= 0) { category[a] = after; continue; }
      if (before >= 0) { rest[before].bytes -= folded[i]; rest[before].count--; }
      if (after >= 0) { rest[after].bytes += folded[i]; rest[after].count++; }
    }
    return { category, rest };
  }

  /** The later allocations that held the value of each one again. */
  #repeats() {
    const found = new Map();
    this.allocs.remat_of.forEach((old, a) => {
      if (old >= 0) found.has(old) ? found.get(old).push(a) : found.set(old, [a]);
    });
    return found;
  }

  text(index) {
    return index < 0 ? "" : this.header.strings[index];
  }

  /** File, line and function of a stack's innermost frame; null if it was not recorded. */
  frame(stack) {
    if (stack < 0) return null;
    const { frames, stacks } = this.tables, f = stacks.frame[stack];
    return f < 0 ? null : { file: this.text(frames.file[f]), line: frames.line[f], name: this.text(frames.function[f]) };
  }

  phase(index) {
    return index < 0 ? "" : this.header.phases[index];
  }

  /** Nanoseconds between the last use of an allocation in the forward pass and its next in the backward pass, or -1. */
  idle(a) {
    const last = this.allocs.last_forward_seq[a], next = this.allocs.next_backward_seq[a];
    if (last < 0 || next <= last) return -1;
    return this.clock(next) - this.clock(last);
  }

  /** The clock at the last operation up to the moment numbered seq. */
  clock(seq) {
    const { seq: seqs, ns } = this.tables.ops, i = countUpTo(seqs, seq) - 1;
    return i < 0 ? 0 : ns[i];
  }

  /** The step that the moment numbered seq is in, or -1. */
  stepAt(seq) {
    const { begin_seq, end_seq } = this.tables.steps, i = countUpTo(begin_seq, seq) - 1;
    return i >= 0 && seq <= end_seq[i] ? i : -1;
  }
}

function extended(values, last) {
  const xs = new Float64Array(values.length + 1);
  let most = values.length ? values[0] : 0;
  for (let i = 0; i < values.length; i++) xs[i] = most = Math.max(most, values[i]);
  xs[values.length] = Math.max(most, last);
  return xs;
}
