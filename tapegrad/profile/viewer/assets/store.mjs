// The state of the page.  What is set within one frame is drawn once, by every part that reads something that changed.

export class Store {
  constructor(state) {
    this.state = state;
    this.parts = [];
    this.changed = new Set();
    this.waiting = false;
  }

  /** draw(state, changed) runs when one of `keys` was set. */
  watch(keys, draw) {
    this.parts.push({ keys, draw });
  }

  set(patch) {
    for (const [key, value] of Object.entries(patch)) {
      if (this.state[key] === value) continue;
      this.state[key] = value;
      this.changed.add(key);
    }
    if (this.changed.size && !this.waiting) {
      this.waiting = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    const changed = this.changed;
    this.changed = new Set();
    this.waiting = false;
    for (const { keys, draw } of this.parts) if (keys.some((key) => changed.has(key))) draw(this.state, changed);
  }

  drawAll() {
    this.changed = new Set(Object.keys(this.state));
    this.draw();
  }
}
