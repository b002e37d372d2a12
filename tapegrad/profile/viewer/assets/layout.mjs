// Where the rectangle of each allocation lies in the picture: at the lowest gap it fits in, as in a simple allocator.
// The height of a rectangle is exact; where it lies means nothing, since the real addresses are not recorded.

const MOST_GAPS = 2048; // a run that leaves more gaps open gets a looser picture instead of a page that hangs

/** The offset of each allocation. */
export function pack(run) {
  const { alloc, change } = run.events;
  const offsets = new Float64Array(run.allocCount);
  const gaps = new Gaps();
  for (let e = 0; e < run.count; e++) {
    const a = alloc[e];
    if (a < 0) continue;
    const size = Math.max(run.allocs.bytes[a], 0);
    if (change[e] >> 4 === 0) offsets[a] = gaps.take(size);
    else if ((change[e] & 15) === 0) gaps.give(offsets[a], size);
  }
  return offsets;
}

/** Free ranges below `top`, in order; above it everything is free. */
export class Gaps {
  constructor() {
    this.starts = [];
    this.sizes = [];
    this.top = 0;
  }

  take(size) {
    for (let i = 0; i < this.starts.length; i++) {
      if (this.sizes[i] < size) continue;
      const at = this.starts[i];
      if (this.sizes[i] === size) this.#remove(i);
      else { this.starts[i] += size; this.sizes[i] -= size; }
      return at;
    }
    this.top += size;
    return this.top - size;
  }

  give(start, size) {
    let low = 0, high = this.starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.starts[middle] < start) low = middle + 1;
      else high = middle;
    }
    this.starts.splice(low, 0, start);
    this.sizes.splice(low, 0, size);
    this.#join(low);
    if (low > 0) this.#join(low - 1);
    const last = this.starts.length - 1;
    if (this.starts[last] + this.sizes[last] === this.top) { this.top = this.starts[last]; this.#remove(last); }
    else if (this.starts.length > MOST_GAPS) this.#remove(last);
  }

  #join(i) {
    if (this.starts[i] + this.sizes[i] !== this.starts[i + 1]) return;
    this.sizes[i] += this.sizes[i + 1];
    this.#remove(i + 1);
  }

  #remove(i) {
    this.starts.splice(i, 1);
    this.sizes.splice(i, 1);
  }
}
