// Elements are built here and only here; text goes in as text, so nothing in a run can become markup.

/** h("td.number", {title: "x", onclick: f}, "text", element): an element with class, attributes and children. */
export function h(what, attributes = {}, ...children) {
  const [tag, ...classes] = what.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

/** A canvas as large as its place, in the pixels of the screen; returns its context, scaled to CSS pixels. */
export function fitCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  const w = Math.round(width * ratio), height_ = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== height_) {
    canvas.width = w;
    canvas.height = height_;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

/** The colours of the style sheet that the canvases use. */
export function themeColours(categories) {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    category: categories.map(of),
    panel: of("panel"), text: of("text"), muted: of("muted"), grid: of("grid"), accent: of("accent"), bad: of("bad"),
    phase: ["forward", "backward", "recompute", "optimizer-phase", "other"].map((name) => of(`band-${name}`)),
  };
}
