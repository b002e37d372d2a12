// The allocation strips: one rectangle for each time an allocation served as something, lifetime wide and bytes high.

import { drawYAxis } from "./timeline.mjs";
import { Raster, mix, pixel } from "./raster.mjs";

const NEAR = 3; // CSS pixels within which a rectangle too thin to hit is still meant

/** A rectangle in places of the x axis and in bytes. */
export function segmentBox(run, offsets, xs, s) {
  const { alloc, begin, end } = run.segments, a = alloc[s];
  return { x0: xs[begin[s]], x1: xs[end[s]], low: offsets[a], high: offsets[a] + run.allocs.bytes[a] };
}

export function drawStrips(plot, offsets, matches, colours) {
  const { run } = plot, context = plot.begin(), scale = plot.ratio;
  const { alloc, category, begin, end, count } = run.segments, { xs } = plot, [from, to] = plot.range;
  const raster = new Raster(plot.inner * scale, plot.innerHeight * scale);
  let most = 1;
  for (let s = 0; s < count; s++)
    if (xs[begin[s]] <= to && xs[end[s]] >= from) most = Math.max(most, offsets[alloc[s]] + run.allocs.bytes[alloc[s]]);
  plot.most = most;
  const across = raster.width / (to - from), up = raster.height / most;
  const paint = shades(colours);
  for (let s = 0; s < count; s++) {
    if (xs[begin[s]] > to || xs[end[s]] < from) continue;
    const a = alloc[s], x0 = Math.floor((xs[begin[s]] - from) * across);
    const x1 = Math.max(x0 + 1, Math.floor((xs[end[s]] - from) * across));
    const y1 = raster.height - Math.floor(offsets[a] * up);
    const y0 = Math.min(y1 - 1, raster.height - Math.floor((offsets[a] + run.allocs.bytes[a]) * up));
    const [body, edge] = matches(a, category[s]) ? paint.full[category[s]][a % 2] : paint.faint[category[s]];
    raster.fill(x0, y0, x1, y1, body);
    if (y1 - y0 < 4 || x1 - x0 < 4) continue;
    raster.fill(x0, y0, x1, y0 + 1, edge);
    raster.fill(x0, y0, x0 + 1, y1, edge);
  }
  drawYAxis(context, plot, most, colours);
  raster.show(context, Math.round(plot.left * scale), Math.round(plot.top * scale));
}

// Two shades of a category by turns, so that neighbours can be told apart; and one for what the filter leaves out.
function shades({ category, panel }) {
  const pair = (colour) => [pixel(colour), pixel(mix(colour, panel, 0.55))];
  return {
    full: category.map((c) => [pair(c), pair(mix(c, panel, 0.14))]),
    faint: category.map((c) => [pixel(mix(c, panel, 0.85)), pixel(panel)]),
  };
}

/** The segment at a point of the picture; the nearest within a few pixels if it lies between rectangles, or -1. */
export function hitSegment(plot, offsets, px, py) {
  const { run, xs } = plot, { begin, end, alloc, count } = run.segments;
  const x = plot.at(px), perPx = (plot.range[1] - plot.range[0]) / plot.inner;
  const bytes = (1 - (py - plot.top) / plot.innerHeight) * plot.most, bytesPerPx = plot.most / plot.innerHeight;
  let best = -1, least = NEAR;
  for (let s = 0; s < count; s++) {
    const dx = outside(x, xs[begin[s]], xs[end[s]]) / perPx;
    if (dx > least) continue;
    const low = offsets[alloc[s]];
    const distance = Math.max(dx, outside(bytes, low, low + run.allocs.bytes[alloc[s]]) / bytesPerPx);
    if (distance === 0) return s;
    if (distance < least) { best = s; least = distance; }
  }
  return best;
}

function outside(value, low, high) {
  return value < low ? low - value : value >= high ? value - high : 0;
}

/** The outline of an allocation's whole life; what lies idle between forward and backward pass is hatched. */
export function drawOutline(context, plot, offsets, a, colours, colour) {
  const { run, xs } = plot, axis = plot.store.state.axis;
  if (a < 0 || run.begin[a] >= run.count) return;
  const x0 = plot.px(xs[run.begin[a]]), x1 = plot.px(xs[run.end[a]]);
  const low = plot.height - plot.bottom - (offsets[a] / plot.most) * plot.innerHeight;
  const size = (run.allocs.bytes[a] / plot.most) * plot.innerHeight;
  context.save();
  context.beginPath();
  context.rect(plot.left, plot.top, plot.inner, plot.innerHeight);
  context.clip();
  const last = run.allocs.last_forward_seq[a], next = run.allocs.next_backward_seq[a];
  if (last >= 0 && next > last) {
    const idle = [last, next].map((seq) => plot.px(run.place(axis, seq, run.clock(seq))));
    hatch(context, idle[0], low - size, idle[1], low, colours.panel);
  }
  context.strokeStyle = colour;
  context.lineWidth = 2;
  context.strokeRect(x0, low - Math.max(size, 1), Math.max(x1 - x0, 1), Math.max(size, 1));
  context.restore();
}

function hatch(context, left, top, right, bottom, colour) {
  context.save();
  context.beginPath();
  context.rect(left, top, right - left, bottom - top);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1.5;
  context.beginPath();
  const from = Math.max(left, -100), to = Math.min(right, 10000);
  for (let x = from - (bottom - top); x < to; x += 7) {
    context.moveTo(x, bottom);
    context.lineTo(x + bottom - top, top);
  }
  context.stroke();
  context.restore();
}
