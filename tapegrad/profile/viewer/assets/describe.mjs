// What is said of an allocation, a call and a moment: the same words in the card, the table and the details.

import { countUpTo } from "./axis.mjs";
import { baseName, exactBytes, formatBytes, formatCount, formatTime, visible } from "./format.mjs";

/** "model.py:42", or the whole path. */
export function placeText(run, stack, whole = false) {
  const frame = run.frame(stack);
  if (!frame) return "";
  return `${visible(whole ? frame.file : baseName(frame.file))}:${frame.line}`;
}

export function functionText(run, stack) {
  const frame = run.frame(stack);
  if (!frame?.name) return "";
  return frame.name.startsWith("<") ? visible(frame.name) : `${visible(frame.name)}()`; // <module>, <lambda>
}

/** "layer block #2": the call's kind and name, and which one of its kind it is in its step. */
export function callText(run, call) {
  if (call < 0) return "";
  const { kind, name, ordinal } = run.tables.calls;
  const kindText = kind[call] < 0 ? "call" : run.header.kinds[kind[call]];
  return `${kindText} ${visible(run.text(name[call]))}${ordinal[call] > 0 ? ` #${ordinal[call] + 1}` : ""}`;
}

export function shapeText(run, a) {
  return `${visible(run.text(run.allocs.dtype[a]))} ${visible(run.text(run.allocs.shape[a]))}`.trim();
}

export function opText(run, a) {
  return visible(run.text(run.allocs.op[a])) || "unnamed";
}

export function numberText(run, a) {
  return `#${run.allocs.number[a]}`;
}

/** "#12 matmul at model.py:42", for links between allocations. */
export function linkText(run, a) {
  const place = placeText(run, run.allocs.stack[a]);
  return `${numberText(run, a)} ${opText(run, a)}${place ? ` at ${place}` : ""}`;
}

export function stepText(run, step) {
  return step < 0 ? "outside steps" : `step ${formatCount(step)}`;
}

/** "step 2 · backward · matmul model.py:42" of the allocation or release that event e is. */
export function momentText(run, e) {
  if (e < 0) return "before the first allocation";
  const a = run.events.alloc[e], change = run.events.change[e], seq = run.events.seq[e];
  const parts = [stepText(run, run.stepAt(seq)), phaseAt(run, seq)];
  if (a >= 0) {
    const did = change >> 4 === 0 ? "" : (change & 15) === 0 ? "freed " : "now " + run.categories[(change & 15) - 1] + ": ";
    parts.push(`${did}${opText(run, a)} ${placeText(run, run.allocs.stack[a])}`);
  }
  return parts.filter(Boolean).join(" · ");
}

export function phaseAt(run, seq) {
  const { seq: begins, phase } = run.tables.bands, i = countUpTo(begins, seq) - 1;
  return i < 0 ? "" : run.phase(phase[i]);
}

/** [label, value] of all that is known of an allocation; `category` is the one it has at the moment asked about. */
export function facts(run, a, category) {
  const t = run.allocs, size = t.bytes[a], asked = t.requested[a];
  const { xs } = run, begin = run.begin[a], end = run.end[a];
  const life = begin < run.count ? xs.time[Math.min(end, run.count)] - xs.time[begin] : 0;
  const idle = run.idle(a);
  return [
    ["bytes", `${formatBytes(size)} (${exactBytes(size)}${asked !== size ? `; array ${exactBytes(asked)}` : ""})`],
    ["category", category >= 0 ? run.categories[category] : ""],
    ["line", placeText(run, t.stack[a], true)],
    ["function", functionText(run, t.stack[a])],
    ["array", shapeText(run, a)],
    ["phase", run.phase(t.phase[a])],
    ["call", callText(run, t.call[a])],
    ["step", stepText(run, t.step[a])],
    ["held by", visible(run.text(t.holder[a]))],
    ["alive for", `${formatTime(life)}${end >= run.count ? ", to the end of the run" : ""}`],
    ["idle", idle >= 0 ? `${formatTime(idle)} between forward and backward pass` : ""],
    ["repeats", t.remat_of[a] >= 0 ? linkText(run, t.remat_of[a]) : ""],
    ["repeated by", (run.repeats.get(a) ?? []).slice(0, 3).map((b) => linkText(run, b)).join(", ")],
    ["device", visible(run.text(t.device[a]))],
  ].filter(([, value]) => value);
}
