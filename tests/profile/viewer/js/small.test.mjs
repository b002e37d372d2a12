// The parts that need no page: figures, axes, gaps, pixels and words.

import assert from "node:assert/strict";
import test from "node:test";

const from = (name) => import(`../../../../tapegrad/profile/viewer/assets/${name}.mjs`);
const { withoutZeros, formatCount, formatTime, visible, baseName, formatShare } = await from("format");
const { countUpTo, decimalTicks, binaryTicks, clampRange, zoomRange } = await from("axis");
const { Gaps } = await from("layout");
const { Raster, pixel, mix } = await from("raster");
const { columnPeaks } = await from("timeline");
const { words } = await from("filter");
const { rerunCalls, reruns, shownCalls } = await from("calls");

test("figures", () => {
  assert.equal(formatCount(1234567), "1,234,567");
  assert.equal(formatCount(-1234), "-1,234");
  assert.equal(formatCount(999), "999");
  assert.deepEqual(["4.00 MiB", "4.50 MiB", "100 ms", "1.25 s"].map(withoutZeros), ["4 MiB", "4.5 MiB", "100 ms", "1.25 s"]);
  assert.deepEqual([0, 999, 1500, 2500000, 250000000, 1.5e9].map(formatTime), ["0 ns", "999 ns", "1.5 µs", "2.5 ms", "250 ms", "1.50 s"]);
  assert.equal(formatShare(1, 4), "25.0 %");
  assert.deepEqual([formatShare(1, 0), formatShare(0, 9), formatShare(1, 1e6)], ["", "0.0 %", "< 0.1 %"]);
});

test("what cannot be seen is spelt out", () => {
  assert.equal(visible("a\u001b[2J\u202eb\u0000\u2066"), "a\\u001b[2J\\u202eb\\u0000\\u2066");
  assert.equal(visible("half \ud800 whole 💥 ünï"), "half \\ud800 whole 💥 ünï");
  assert.equal(baseName("C:\\Users\\zoë\\x.py"), "x.py");
  assert.equal(baseName("/a/b.py"), "b.py");
  assert.equal(baseName("b.py"), "b.py");
});

test("searches count what is at most x", () => {
  const values = Float64Array.of(1, 2, 2, 2, 5);
  for (const [x, n] of [[0, 0], [1, 1], [2, 4], [4.9, 4], [5, 5], [9, 5]]) assert.equal(countUpTo(values, x), n);
});

test("ticks are round and few", () => {
  assert.deepEqual(decimalTicks(0, 100, 5), [0, 20, 40, 60, 80, 100]);
  assert.deepEqual(decimalTicks(3, 5, 4, 1), [3, 4, 5]);
  assert.deepEqual(binaryTicks(6 << 20, 6), [0, 1, 2, 3, 4, 5, 6].map((n) => n << 20));
  assert.ok(binaryTicks(2 ** 50, 6).length <= 7);
  assert.ok(decimalTicks(0, 1e18, 10).length <= 12);
});

test("the shown range stays within the run", () => {
  assert.deepEqual(clampRange([-5, 5], 0, 100, 1), [0, 10]);
  assert.deepEqual(clampRange([95, 105], 0, 100, 1), [90, 100]);
  assert.deepEqual(clampRange([50, 50.1], 0, 100, 4), [50, 54]);
  assert.deepEqual(clampRange([-500, 500], 0, 100, 4), [0, 100]);
  assert.deepEqual(zoomRange([0, 100], 0.5, 20), [10, 60]);
});

test("what is placed never overlaps what is alive, and freed room is used again", () => {
  let seed = 1;
  const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
  const gaps = new Gaps(), alive = [];
  for (let i = 0; i < 3000; i++) {
    if (alive.length > 40 || (alive.length && random(3) === 0)) gaps.give(...alive.splice(random(alive.length), 1)[0]);
    else {
      const size = 1 + random(50), at = gaps.take(size);
      for (const [start, length] of alive) assert.ok(at + size <= start || start + length <= at);
      alive.push([at, size]);
    }
  }
  for (const block of alive) gaps.give(...block);
  assert.deepEqual([gaps.top, gaps.starts.length], [0, 0]);
});

test("a picture with too many gaps is loose, not wrong", () => {
  const gaps = new Gaps(), blocks = Array.from({ length: 10000 }, () => gaps.take(1));
  for (let i = 0; i < blocks.length - 1; i += 2) gaps.give(blocks[i], 1);
  assert.ok(gaps.starts.length <= 2049);
  const taken = new Set(blocks.filter((_, i) => i % 2));
  for (let i = 0; i < 3000; i++) {
    const at = gaps.take(1);
    assert.ok(!taken.has(at));
    taken.add(at);
  }
});

test("pixels are filled within bounds and nowhere else", () => {
  const raster = new Raster(4, 3);
  raster.fill(-2, 1, 2, 9, 7);
  assert.deepEqual([...raster.pixels], [0, 0, 0, 0, 7, 7, 0, 0, 7, 7, 0, 0]);
  raster.fill(5, 0, 9, 1, 8);
  assert.ok(!raster.pixels.includes(8));
  assert.equal(pixel("#102030"), 0xff302010);
  assert.equal(mix("#000000", "#ff8000", 0.5), "#804000");
});

test("a column shows the most that was alive within it", () => {
  const totals = Float64Array.of(5, 9, 2, 7, 1), xs = Float64Array.of(0, 1, 2, 3, 4, 5);
  assert.deepEqual([...columnPeaks(totals, xs, 0, 5, 5)], [0, 1, 1, 3, 3]);
  assert.deepEqual([...columnPeaks(totals, xs, 0, 4, 1)], [1]);
  assert.deepEqual([...columnPeaks(totals, xs, 3.5, 5, 3)], [3, 3, 4]);
  assert.deepEqual([...columnPeaks(totals, xs, -2, 0, 2)], [-1, 0]);
  assert.deepEqual([...columnPeaks(new Float64Array(0), new Float64Array(1), 0, 1, 2)], [-1, -1]);
});

test("no peak is lost at any width", () => {
  const totals = Float64Array.from({ length: 5000 }, (_, i) => (i * 7919) % 4999), xs = Float64Array.from({ length: 5001 }, (_, i) => i * i);
  for (const width of [1, 7, 100, 1333]) {
    const found = columnPeaks(totals, xs, 0, xs[5000], width);
    assert.equal(Math.max(...[...found].map((e) => (e < 0 ? 0 : totals[e]))), 4998);
  }
});

test("words and quotations", () => {
  assert.deepEqual(words('MatMul  "a b" "open end'), ["matmul", "a b", "open end"]);
  assert.deepEqual(words(' "" '), []);
});

// step(0) > loss(1) > [block(2), block(3)], and the rerun block(4) > [dense(5), rerun inside(6)]; then step(7) > loss(8).
const CALLS = {
  parent: [-1, 0, 1, 1, 0, 4, 4, -1, 7], first: [-1, -1, -1, -1, 3, -1, 2, -1, -1],
  name: [0, 1, 2, 2, 2, 3, 2, 0, 1], file: Array(9).fill(4), line: Array(9).fill(7),
  begin_ns: [0, 1, 2, 4, 10, 11, 12, 30, 31], end_ns: [25, 9, 4, 8, 20, 12, 15, 40, 39],
};

test("reruns inside reruns are part of the outer one", () => {
  const { outer, inside } = rerunCalls(CALLS);
  assert.deepEqual([outer, [...inside]], [[4], [0, 0, 0, 0, 1, 1, 1, 0, 0]]);
  const run = { tables: { calls: CALLS }, text: (i) => ["step", "loss", "block", "dense", "m.py"][i] };
  assert.deepEqual(reruns(run), [{ name: "block", file: "m.py", line: 7, count: 1, ns: 10 }]);
});

test("calls are drawn at the depth at which a step has several", () => {
  const run = (steps) => ({ tables: { calls: CALLS, steps: { begin_seq: Array(steps) } } });
  assert.deepEqual(shownCalls(run(0)), [0, 7, 4]); // no depth has more than two
  const many = { ...CALLS, parent: [-1, 0, 1, 1, 0, 4, 4, 1, 1] };
  assert.deepEqual(shownCalls({ tables: { calls: many, steps: { begin_seq: [0] } } }), [2, 3, 7, 8, 4]);
});
