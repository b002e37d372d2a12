// Figures and names as text.  Whatever comes from the run is shown through visible().

const UNITS = ["KiB", "MiB", "GiB", "TiB", "PiB"];

/** IEC units with two decimals, to the digit as the command line prints them. */
export function formatBytes(bytes) {
  if (Math.abs(bytes) < 1024) return `${bytes} B`;
  let value = bytes, unit = "";
  for (unit of UNITS) {
    value /= 1024;
    if (Math.abs(value) < 1023.995) break;
  }
  return `${hundredths(value)} ${unit}`;
}

// Python rounds what lies halfway (1.125) to the even digit, toFixed() up; the same bytes must not read differently.
function hundredths(value) {
  const below = Math.floor(value * 100);
  return value * 100 - below === 0.5 ? ((below + (below & 1)) / 100).toFixed(2) : value.toFixed(2);
}

/** A figure without the zeros after its point, for the marks of an axis. */
export function withoutZeros(text) {
  return text.replace(/(\.\d*?)0+ /, "$1 ").replace(". ", " ");
}

/** An integer with a comma after every third digit, in every locale: reports are compared across machines. */
export function formatCount(n) {
  return String(n).replace(/\B(?=(\d{3})+$)/g, ",");
}

export function exactBytes(bytes) {
  return `${formatCount(bytes)} B`;
}

export function formatTime(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${(ns / 1e9).toFixed(2)} s`;
  if (size >= 1e6) return `${(ns / 1e6).toFixed(size >= 1e8 ? 0 : 1)} ms`;
  return size >= 1e3 ? `${(ns / 1e3).toFixed(1)} µs` : `${ns} ns`;
}

export function formatShare(part, whole) {
  if (!(whole > 0)) return "";
  const percent = (100 * part) / whole;
  return percent > 0 && percent < 0.05 ? "< 0.1 %" : `${percent.toFixed(1)} %`;
}

export function plural(n, one, many = `${one}s`) {
  return `${formatCount(n)} ${n === 1 ? one : many}`;
}

// Control characters, marks that turn the direction of writing, and halves of characters: a name could hide in them.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]|\p{Surrogate}/gu;

export function visible(text) {
  return String(text).replace(HIDDEN, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
}

/** The last part of a path of either kind of system. */
export function baseName(path) {
  return path.slice(Math.max(path.lastIndexOf("/"), path.lastIndexOf("\\")) + 1);
}
