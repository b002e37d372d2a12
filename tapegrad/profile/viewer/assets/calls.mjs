// Calls: how deep each lies, which are reruns, and which are worth a place above the timeline.

/** How many calls each call is inside of. */
function depths(calls) {
  const found = new Int32Array(calls.parent.length);
  calls.parent.forEach((parent, i) => { if (parent >= 0) found[i] = found[parent] + 1; }); // parents come first
  return found;
}

/** Calls that repeat an earlier one (`outer`; a rerun inside a rerun is part of the outer one), and all inside them. */
export function rerunCalls(calls) {
  const inside = new Uint8Array(calls.first.length), outer = [];
  calls.first.forEach((first, i) => {
    const parent = calls.parent[i];
    if (parent >= 0 && inside[parent]) inside[i] = 1;
    else if (first >= 0) {
      inside[i] = 1;
      outer.push(i);
    }
  });
  return { outer, inside };
}

/** Reruns by what was rerun. */
export function reruns(run) {
  const { calls } = run.tables, found = new Map();
  for (const i of rerunCalls(calls).outer) {
    const key = `${calls.name[i]} ${calls.file[i]} ${calls.line[i]}`;
    if (!found.has(key)) found.set(key, { name: run.text(calls.name[i]), file: run.text(calls.file[i]), line: calls.line[i], count: 0, ns: 0 });
    const row = found.get(key);
    row.count++;
    row.ns += Math.max(calls.end_ns[i] - calls.begin_ns[i], 0);
  }
  return [...found.values()].sort((a, b) => b.ns - a.ns);
}

/**
 * The calls to draw side by side: a step is often one call inside another, which says nothing, so the first depth with
 * several in each step; and the reruns, however deep.
 */
export function shownCalls(run) {
  const { calls, steps } = run.tables, depth = depths(calls), { outer, inside } = rerunCalls(calls), counts = [];
  depth.forEach((d, i) => { if (!inside[i]) counts[d] = (counts[d] ?? 0) + 1; });
  const level = Math.max(counts.findIndex((n) => n > 2 * Math.max(steps.begin_seq.length, 1)), 0);
  return [...depth.keys()].filter((i) => depth[i] === level && !inside[i]).concat(outer);
}
