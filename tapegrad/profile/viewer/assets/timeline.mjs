// The stacked timeline of categories.  Every column of pixels shows the moment within it at which most was alive, so no
// peak is lost however far one zooms out; between events nothing changes, so edges are vertical.

import { binaryTicks, countUpTo, decimalTicks } from "./axis.mjs";
import { formatBytes, formatCount, formatTime, visible, withoutZeros } from "./format.mjs";
import { Raster, mix, pixel } from "./raster.mjs";

const LANE = 15;

/** For each of `width` columns of [from, to) the event after which most was alive in it; -1: nothing yet. */
export function columnPeaks(totals, xs, from, to, width) {
  const found = new Int32Array(width), n = totals.length;
  let next = countUpTo(xs, from, n);
  for (let column = 0; column < width; column++) {
    let best = next - 1;
    const right = column === width - 1 ? to : from + ((column + 1) * (to - from)) / width;
    for (; next < n && (xs[next] < right || (column === width - 1 && xs[next] <= to)); next++)
      if (best < 0 || totals[next] > totals[best]) best = next;
    found[column] = best;
  }
  return found;
}

/** Draws the stack of [from, to) into a new raster; returns it with the most bytes that its height stands for. */
export function drawStack(run, xs, [from, to], width, height, colours, { chosen, room = 1.05, least = 0 }) {
  const raster = new Raster(width, height);
  const peaks = columnPeaks(run.totals, xs, from, to, raster.width);
  let most = Math.max(least, 1);
  for (const e of peaks) most = Math.max(most, run.total(e) * room);
  const pixels = colours.category.map((c, i) => pixel(!chosen.size || chosen.has(i) ? c : mix(c, colours.panel, 0.8)));
  for (let column = 0; column < raster.width; ) {
    const e = peaks[column];
    let until = column + 1;
    while (until < raster.width && peaks[until] === e) until++;
    let sum = 0, bottom = raster.height;
    const sums = run.sums(e);
    for (let i = 0; i < sums.length; i++) {
      sum += sums[i];
      const top = raster.height - Math.round((sum / most) * raster.height);
      raster.fill(column, top, until, bottom, pixels[i]);
      bottom = Math.min(top, bottom);
    }
    column = until;
  }
  return { raster, most };
}

export function drawTimeline(plot, colours) {
  const { run, store } = plot, context = plot.begin(), { axis, chosen } = store.state;
  const scale = plot.ratio, x0 = Math.round(plot.left * scale), y0 = Math.round(plot.top * scale);
  const limit = run.header.meta.limit_bytes ?? 0, peak = run.header.peak.bytes;
  const least = Math.max(limit > 0 && limit < peak * 1.6 ? limit * 1.03 : 0, reservedMost(run, peak));
  const { raster, most } = drawStack(
    run, plot.xs, plot.range, plot.inner * scale, plot.innerHeight * scale, colours, { chosen, least },
  );
  plot.most = most;
  drawYAxis(context, plot, most, colours);
  raster.show(context, x0, y0);
  drawXAxis(context, plot, axis, colours);
  context.save();
  context.beginPath();
  context.rect(plot.left, 0, plot.inner, plot.height);
  context.clip();
  drawLanes(context, plot, axis, colours);
  drawReserved(context, plot, axis, colours);
  if (limit > 0 && limit <= most) drawLimit(context, plot, limit, colours);
  drawMarks(context, plot, axis, colours);
  context.restore();
}

export function y(plot, bytes) {
  return plot.top + plot.innerHeight * (1 - bytes / plot.most);
}

export function drawYAxis(context, plot, most, colours) {
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const tick of binaryTicks(most, 6)) {
    const at = Math.round(plot.top + plot.innerHeight * (1 - tick / most)) + 0.5;
    context.fillStyle = colours.grid;
    context.fillRect(plot.left, at - 0.5, plot.inner, 1);
    context.fillStyle = colours.muted;
    context.fillText(withoutZeros(formatBytes(tick)), plot.left - 8, at);
  }
}

function drawXAxis(context, plot, axis, colours) {
  const [from, to] = plot.range, at = plot.height - plot.bottom + 12;
  context.fillStyle = colours.muted;
  context.textAlign = "center";
  for (const tick of decimalTicks(from, to, Math.max(2, plot.inner / 110), 1)) {
    const x = plot.px(tick), text = axis === "time" ? withoutZeros(formatTime(tick)) : formatCount(tick);
    const half = context.measureText(text).width / 2; // the last label stays within the picture
    context.fillRect(Math.round(x), plot.height - plot.bottom, 1, 4);
    context.fillText(text, Math.min(x, plot.width - half), at);
  }
}

// Three lanes above the stack: steps, phases, and calls.
function drawLanes(context, plot, axis, colours) {
  const { run } = plot, { steps, bands, calls } = run.tables, end = run.spans[axis][1];
  const at = (table, i, which) => run.place(axis, table[`${which}_seq`][i], table[`${which}_ns`][i]);
  const top = plot.top - 3 * LANE - 4;
  for (let i = 0; i < steps.begin_seq.length; i++)
    bar(context, plot, at(steps, i, "begin"), at(steps, i, "end"), top, colours.grid, `step ${i}`, colours);
  for (let i = 0; i < bands.seq.length; i++) {
    const to = i + 1 < bands.seq.length ? run.place(axis, bands.seq[i + 1], bands.ns[i + 1]) : end;
    const phase = bands.phase[i];
    if (phase >= 0 && run.phase(phase) !== "other")
      bar(context, plot, run.place(axis, bands.seq[i], bands.ns[i]), to, top + LANE, colours.phase[phase], run.phase(phase), colours);
  }
  for (const i of run.shownCalls) {
    const colour = calls.first[i] >= 0 ? colours.phase[2] : colours.grid;
    bar(context, plot, at(calls, i, "begin"), at(calls, i, "end"), top + 2 * LANE, colour, visible(run.text(calls.name[i])), colours);
  }
}

function bar(context, plot, from, to, top, colour, text, colours) {
  const left = Math.max(plot.px(from), plot.left), right = Math.min(plot.px(to), plot.left + plot.inner);
  if (right < plot.left || left > plot.left + plot.inner) return;
  context.fillStyle = colour;
  context.fillRect(left, top, Math.max(right - left - 1, 1), LANE - 2);
  if (right - left < 24) return;
  context.fillStyle = colours.text;
  context.textAlign = "left";
  const width = context.measureText(text).width;
  if (width + 8 < right - left) context.fillText(text, left + 4, top + LANE / 2 - 0.5);
}

/** The most that was reserved, if that can be shown beside the peak without flattening it. */
function reservedMost(run, peak) {
  const most = run.tables.samples.reserved_bytes.reduce((m, b) => Math.max(m, b), 0);
  return most < 2 * peak ? most * 1.05 : 0;
}

function drawReserved(context, plot, axis, colours) {
  const { seq, reserved_bytes: reserved } = plot.run.tables.samples, { ns } = plot.run.events;
  context.strokeStyle = colours.muted;
  context.setLineDash([1, 2]);
  context.beginPath();
  let last = null;
  for (let i = 0; i < seq.length; i++) {
    if (reserved[i] < 0) continue;
    const x = plot.px(plot.run.place(axis, seq[i], ns[Math.max(plot.run.eventAt(seq[i]), 0)] ?? 0));
    if (last === null) context.moveTo(x, y(plot, reserved[i]));
    else { context.lineTo(x, last); context.lineTo(x, y(plot, reserved[i])); }
    last = y(plot, reserved[i]);
  }
  if (last !== null) context.lineTo(plot.left + plot.inner, last);
  context.stroke();
  context.setLineDash([]);
  if (last === null) return;
  context.fillStyle = colours.muted;
  context.textAlign = "right";
  context.fillText("reserved", plot.left + plot.inner - 4, last - 7);
}

function drawLimit(context, plot, limit, colours) {
  const at = Math.round(y(plot, limit)) + 0.5;
  context.fillStyle = colours.bad;
  context.fillRect(plot.left, at - 0.5, plot.inner, 1);
  context.textAlign = "right";
  context.fillText(`limit ${formatBytes(limit)}`, plot.left + plot.inner - 4, at + 8);
}

// Notes of the program's own; the peak and a failure are buttons, so that they can be reached by keyboard.
function drawMarks(context, plot, axis, colours) {
  const { run } = plot, { seq, ns, kind, text } = run.tables.marks;
  for (let i = 0; i < seq.length; i++) {
    const name = run.header.mark_kinds[kind[i]];
    if (name !== "user" && name !== "recording stopped") continue;
    const x = Math.round(plot.px(run.place(axis, seq[i], ns[i])));
    context.fillStyle = colours.muted;
    context.fillRect(x, plot.top, 1, plot.innerHeight);
    context.textAlign = "left";
    context.fillText(visible(run.text(text[i])) || name, x + 3, plot.top + 8);
  }
}
