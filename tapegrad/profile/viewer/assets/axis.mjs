// Searches in sorted columns, and round numbers for the marks of an axis.

/** How many of the sorted values are at most x. */
export function countUpTo(values, x, length = values.length) {
  let low = 0, high = length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Multiples of 1, 2 or 5 times a power of ten within [from, to], about `wanted` of them. */
export function decimalTicks(from, to, wanted, least = 0) {
  const rough = Math.max((to - from) / wanted, least, Number.MIN_VALUE);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  return multiples(from, to, step);
}

/** Multiples of a power of two within [0, to], at most `most` of them besides 0: sizes are read in IEC units. */
export function binaryTicks(to, most) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(Math.max(to, 1) / most)));
  return multiples(0, to, step);
}

function multiples(from, to, step) {
  const found = [];
  for (let i = Math.ceil(from / step); i * step <= to && found.length < 100; i++) found.push(i * step);
  return found;
}

/** The part of an axis that is shown: within [begin, end], never narrower than `least`. */
export function clampRange([from, to], begin, end, least) {
  const width = Math.min(Math.max(to - from, least), end - begin);
  const start = Math.min(Math.max(from, begin), end - width);
  return [start, start + width];
}

export function zoomRange([from, to], factor, around) {
  return [around - (around - from) * factor, around + (to - around) * factor];
}
