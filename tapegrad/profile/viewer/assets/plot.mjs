// A picture over the x axis of the page: one canvas for what was drawn, one above it for cursor, brush and highlights.

import { clampRange, zoomRange } from "./axis.mjs";
import { fitCanvas, h } from "./dom.mjs";

const LEFT = 74, RIGHT = 10; // CSS pixels for the labels of the y axis, and for half a label at the end
const DRAG = 4; // a pointer that moves less than this has clicked

export function shownRange(run, state) {
  return state.range ?? run.spans[state.axis];
}

export function setRange(store, run, range) {
  const axis = store.state.axis, [begin, end] = run.spans[axis];
  const [from, to] = clampRange(range, begin, end, axis === "time" ? 100 : 4);
  store.set({ range: from <= begin && to >= end ? null : [from, to] });
}

export class Plot {
  constructor(run, store, { top, bottom, height, attributes }) {
    Object.assign(this, { run, store, top, bottom, height });
    this.base = h("canvas", { "aria-hidden": "true" });
    this.above = h("canvas", { "aria-hidden": "true" });
    this.element = h("div.plot", attributes, this.base, this.above);
    this.element.style.height = `${height}px`;
    this.brush = null;
    this.handlers = {}; // move, click and leave
    this.#listen();
  }

  /** Begins a drawing: the canvas is cleared, and the size of the place it is in taken. */
  begin() {
    this.width = this.element.clientWidth;
    this.ratio = window.devicePixelRatio || 1;
    this.inner = Math.max(this.width - LEFT - RIGHT, 10);
    this.innerHeight = this.height - this.top - this.bottom;
    this.left = LEFT;
    this.range = shownRange(this.run, this.store.state);
    this.xs = this.run.xs[this.store.state.axis];
    return fitCanvas(this.base, this.width, this.height);
  }

  beginAbove() {
    return fitCanvas(this.above, this.width, this.height);
  }

  /** CSS pixels of a place on the x axis, and back. */
  px(x) {
    const [from, to] = this.range;
    return LEFT + ((x - from) / (to - from)) * this.inner;
  }

  at(px) {
    const [from, to] = this.range;
    return from + ((px - LEFT) / this.inner) * (to - from);
  }

  /** The last event at or left of a point. */
  eventAtPx(px) {
    const x = this.at(px), xs = this.xs;
    let low = 0, high = this.run.count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle + 1;
      else high = middle;
    }
    return low - 1;
  }

  /** The vertical line at the cursor, and the range that is being dragged. */
  drawCursor(context, colours) {
    const { cursor } = this.store.state;
    if (cursor >= 0) {
      const x = Math.round(this.px(this.xs[cursor])) + 0.5;
      if (x >= LEFT && x <= LEFT + this.inner) {
        context.strokeStyle = colours.text;
        context.lineWidth = 1;
        context.beginPath();
        context.moveTo(x, this.top);
        context.lineTo(x, this.height - this.bottom);
        context.stroke();
      }
    }
    if (this.brush) {
      const [from, to] = this.brush;
      context.fillStyle = colours.accent + "33";
      context.fillRect(Math.min(from, to), this.top, Math.abs(to - from), this.innerHeight);
    }
  }

  #listen() {
    let down = null;
    const place = (event) => {
      const box = this.element.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    this.element.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.target.closest("button")) return;
      down = place(event);
      this.element.setPointerCapture(event.pointerId);
    });
    this.element.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (down && Math.abs(x - down[0]) >= DRAG) this.brush = [down[0], x];
      this.handlers.move?.(x, y, event);
    });
    this.element.addEventListener("pointerup", (event) => {
      if (!down) return;
      const [x, y] = place(event), brush = this.brush;
      down = this.brush = null;
      if (brush) setRange(this.store, this.run, brush.map((px) => this.at(px)).sort((a, b) => a - b));
      else this.handlers.click?.(x, y);
    });
    this.element.addEventListener("pointercancel", () => { down = this.brush = null; });
    this.element.addEventListener("pointerleave", () => this.handlers.leave?.());
    this.element.addEventListener("dblclick", () => this.store.set({ range: null }));
    this.element.addEventListener("wheel", (event) => this.#wheel(event, place(event)[0]), { passive: false });
  }

  // A plain wheel scrolls the page, as everywhere; sideways it moves along the run, with Ctrl it zooms.
  #wheel(event, px) {
    const [from, to] = this.range;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      setRange(this.store, this.run, zoomRange([from, to], Math.exp(event.deltaY / 300), this.at(px)));
    } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      const by = (event.deltaX / this.inner) * (to - from);
      setRange(this.store, this.run, [from + by, to + by]);
    }
  }
}
