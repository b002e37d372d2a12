// The pictures, one above the other over one x axis: timeline, strips, and the whole run in small.

import { byId, h, themeColours } from "./dom.mjs";
import { facts } from "./describe.mjs";
import { failure, moveCursor } from "./cursor.mjs";
import { compile } from "./filter.mjs";
import { exactBytes, formatBytes, formatTime } from "./format.mjs";
import { pack } from "./layout.mjs";
import { Plot, setRange } from "./plot.mjs";
import { drawOutline, drawStrips, hitSegment } from "./strips.mjs";
import { drawStack, drawTimeline } from "./timeline.mjs";

export class Charts {
  constructor(run, store) {
    Object.assign(this, { run, store, offsets: pack(run) });
    this.card = h("div.card-hover", { id: "card", role: "tooltip", hidden: true });
    this.timeline = new Plot(run, store, {
      top: 70, bottom: 22, height: 320,
      attributes: {
        id: "timeline", tabindex: "0", role: "slider", "aria-label": "Bytes alive over the run; arrow keys move the cursor",
        "aria-valuemin": "0", "aria-valuemax": String(Math.max(run.count - 1, 0)), "aria-valuenow": "0",
      },
    });
    this.strips = new Plot(run, store, {
      top: 6, bottom: 6, height: 280,
      attributes: { id: "strips", role: "img", "aria-label": "One rectangle per allocation; the table below lists the same" },
    });
    this.mini = new Plot(run, store, {
      top: 2, bottom: 2, height: 44,
      attributes: { id: "minimap", role: "img", "aria-label": "The whole run; drag to choose what the pictures above show" },
    });
    this.flags = this.#flags();
    this.timeline.element.append(...this.flags.map((flag) => flag.element));
    this.#listen();
    this.#watch();
  }

  // The peak and a failure as buttons at their places.
  #flags() {
    const flag = (id, text, event, title) => ({ event, element: h("button.flag", { type: "button", id, title, onclick: () => moveCursor(this.store, this.run, event) }, text) });
    const { run } = this, flags = [];
    if (run.count) flags.push(flag("peak-mark", `peak ${formatBytes(run.header.peak.bytes)}`, run.peakEvent, "go to the peak (p)"));
    const failed = failure(run);
    if (failed !== null) flags.push(flag("oom-mark", "out of memory", failed, "go to the failure (o)"));
    return flags;
  }

  #listen() {
    const { store, run, timeline, strips, mini } = this;
    timeline.handlers = {
      click: (x) => moveCursor(store, run, timeline.eventAtPx(x)),
      move: (x, y, event) => { this.#above(); this.#momentCard(x, event); },
      leave: () => this.#hide(),
    };
    strips.handlers = {
      click: (x, y) => {
        const s = hitSegment(strips, this.offsets, x, y);
        if (s >= 0) store.set({ selected: run.segments.alloc[s] });
        moveCursor(store, run, strips.eventAtPx(x));
      },
      move: (x, y, event) => this.#strip(x, y, event),
      leave: () => this.#hide(),
    };
    mini.handlers = {
      click: (x) => {
        const [from, to] = timeline.range, half = (to - from) / 2, at = mini.at(x);
        if (store.state.range) setRange(store, run, [at - half, at + half]);
        else moveCursor(store, run, mini.eventAtPx(x));
      },
      move: () => this.#above(),
    };
  }

  #strip(x, y, event) {
    const s = this.strips.brush ? -1 : hitSegment(this.strips, this.offsets, x, y), { alloc, category } = this.run.segments;
    this.store.set({ hovered: s >= 0 ? alloc[s] : -1 });
    this.#above();
    if (s < 0) { this.card.hidden = true; return; }
    this.#show(event, [...facts(this.run, alloc[s], category[s])], this.run.text(this.run.allocs.op[alloc[s]]), category[s]);
    this.card.dataset.alloc = this.run.allocs.number[alloc[s]];
  }

  #momentCard(x, event) {
    if (this.timeline.brush || x < this.timeline.left || !this.run.count) { this.card.hidden = true; return; }
    const e = this.timeline.eventAtPx(x), sums = this.run.sums(e);
    const rows = this.run.categories.map((name, i) => [name, sums[i] ? formatBytes(sums[i]) : ""]).filter(([, v]) => v);
    const at = e < 0 ? "before the first allocation" : formatTime(this.run.events.ns[e]);
    this.#show(event, [["at", at], ...rows.reverse()], `${formatBytes(this.run.total(e))} alive`, -1);
  }

  #show(event, rows, title, category) {
    const swatch = category >= 0 ? h("span.swatch", { style: `background: var(--${this.run.categories[category]})` }) : null;
    this.card.replaceChildren(h("p.title", {}, swatch, title), h("dl", {}, rows.flatMap(([k, v]) => [h("dt", {}, k), h("dd", {}, v)])));
    this.card.hidden = false;
    const { width, height } = this.card.getBoundingClientRect();
    const left = event.clientX + 16 + width > innerWidth ? event.clientX - width - 16 : event.clientX + 16;
    this.card.style.left = `${Math.max(left, 4)}px`;
    this.card.style.top = `${Math.max(Math.min(event.clientY + 16, innerHeight - height - 4), 4)}px`;
  }

  #hide() {
    this.card.hidden = true;
    this.store.set({ hovered: -1 });
    this.#above();
  }

  #watch() {
    this.store.watch(["axis", "range", "size", "theme", "chosen", "query", "only"], (state, changed) => this.#draw(state, changed));
    this.store.watch(["axis", "range", "size", "theme", "chosen", "query", "only", "cursor", "hovered", "selected"], (state) => {
      const slider = this.timeline.element;
      slider.setAttribute("aria-valuenow", String(Math.max(state.cursor, 0)));
      slider.setAttribute("aria-valuetext", `${exactBytes(this.run.total(state.cursor))} alive`);
      this.#above();
    });
  }

  #draw(state, changed) {
    if (changed.has("theme") || !this.colours) this.colours = themeColours(this.run.categories);
    drawTimeline(this.timeline, this.colours);
    drawStrips(this.strips, this.offsets, compile(this.run, state), this.colours);
    this.#drawMini(state);
    for (const { event, element } of this.flags) this.#placeFlag(event, element);
  }

  #placeFlag(event, element) {
    const x = this.timeline.px(this.timeline.xs[Math.max(event, 0)]);
    element.hidden = x < this.timeline.left - 1 || x > this.timeline.left + this.timeline.inner + 1;
    const half = element.offsetWidth / 2; // the tip stays at its place, the text within the picture
    element.style.left = `${Math.min(Math.max(x - half, 2), this.timeline.width - 2 * half - 2)}px`;
  }

  #drawMini(state) {
    const mini = this.mini, context = mini.begin(), scale = mini.ratio;
    mini.range = this.run.spans[state.axis];
    const { raster } = drawStack(this.run, mini.xs, mini.range, mini.inner * scale, mini.innerHeight * scale, this.colours, { chosen: state.chosen });
    raster.show(context, Math.round(mini.left * scale), Math.round(mini.top * scale));
  }

  #above() {
    const { hovered, selected } = this.store.state, { timeline, strips, colours } = this;
    if (!colours) return;
    timeline.drawCursor(timeline.beginAbove(), colours);
    this.#stems(timeline.beginAbove());
    const above = strips.beginAbove();
    strips.drawCursor(above, colours);
    if (selected >= 0) drawOutline(above, strips, this.offsets, selected, colours, colours.accent);
    if (hovered >= 0) drawOutline(above, strips, this.offsets, hovered, colours, colours.text);
    this.#window();
  }

  // From each flag down to the axis.
  #stems(context) {
    const { timeline, colours } = this;
    for (const { event, element } of this.flags) {
      if (element.hidden) continue;
      context.fillStyle = element.id === "oom-mark" ? colours.bad : colours.accent;
      context.fillRect(Math.round(timeline.px(timeline.xs[Math.max(event, 0)])), 20, 1, timeline.height - timeline.bottom - 20);
    }
    timeline.drawCursor(context, colours);
  }

  // What the pictures above do not show is veiled.
  #window() {
    const { mini, timeline, colours } = this, context = mini.beginAbove();
    const [from, to] = timeline.range.map((x) => mini.px(x));
    context.fillStyle = colours.panel + "b0";
    context.fillRect(mini.left, 0, from - mini.left, mini.height);
    context.fillRect(to, 0, mini.left + mini.inner - to, mini.height);
    context.strokeStyle = colours.accent;
    context.strokeRect(from + 0.5, 1, Math.max(to - from - 1, 2), mini.height - 2);
    mini.drawCursor(context, colours);
  }

  /** The rectangle of an allocation in CSS pixels of the window, for tests. */
  boxOf(a) {
    const { strips, offsets, run } = this, box = strips.element.getBoundingClientRect();
    const y = (bytes) => box.top + strips.height - strips.bottom - (bytes / strips.most) * strips.innerHeight;
    return {
      left: box.left + strips.px(strips.xs[run.begin[a]]), right: box.left + strips.px(strips.xs[run.end[a]]),
      top: y(offsets[a] + run.allocs.bytes[a]), bottom: y(offsets[a]),
    };
  }
}

/** Buttons that choose the axis and move over the run. */
export function toolbar(run, store, actions) {
  const button = (text, title, action) => h("button", { type: "button", title, onclick: actions[action] }, text);
  const axis = (name, text, title) =>
    h("label", { title }, h("input", { type: "radio", name: "axis", value: name, checked: name === "time", onchange: () => actions.axis(name) }), h("span", {}, text));
  store.watch(["axis"], (state) => {
    const input = byId("toolbar").querySelector(`input[value=${state.axis}]`);
    input.checked = true;
  });
  return h("div.toolbar", { id: "toolbar" },
    h("fieldset.switch", { "aria-label": "What the x axis counts" },
      axis("time", "time", "wall clock"), axis("event", "event", "every event takes the same room"), axis("op", "operation", "operations in their order")),
    h("span.group", {}, button("◂ step", "peak of the step before ([)", "stepBefore"), button("peak", "go to the peak (p)", "peak"),
      failure(run) === null ? null : button("failure", "go to the failure (o)", "oom"), button("step ▸", "peak of the next step (])", "stepAfter")),
    h("span.group", {}, button("−", "zoom out (-)", "zoomOut"), button("+", "zoom in (+)", "zoomIn"), button("whole run", "show everything (0)", "whole")));
}
