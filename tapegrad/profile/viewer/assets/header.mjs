// What stands above and below the pictures: the run's figures, a failure, what would help, and where it all comes from.

import { h } from "./dom.mjs";
import { momentText, placeText, opText } from "./describe.mjs";
import { failure, moveCursor } from "./cursor.mjs";
import { exactBytes, formatBytes, formatCount, formatShare, formatTime, plural, visible } from "./format.mjs";
import { table } from "./lineage.mjs";

const OUTCOMES = new Map([
  ["finished", ["finished", "good"]], ["oom", ["out of memory", "bad"]], ["exception", ["ended by an exception", "bad"]],
  ["interrupted", ["interrupted", "warn"]], ["running", ["still running", "warn"]],
]);

export function header(run, tools) {
  const { meta } = run.header, program = meta.module ? `-m ${meta.module}` : meta.program;
  const args = meta.argv.slice(1).join(" ");
  return h("header", {},
    h("div.top", {}, h("span.brand", {}, "tapegrad memory report"), tools),
    h("h1", {}, h("bdi", {}, visible(program)), args ? h("bdi.args", {}, ` ${visible(args)}`) : null),
    h("p.badges", {}, outcome(meta.outcome), ledger(run), dropped(run), foldedNote(run), mismatch(run)),
    h("div.figures", {}, peakFigure(run), reservedFigure(run), deviceFigure(run), stepFigure(run)));
}

function badge(kind, text, title) {
  return h(`span.badge.${kind}`, { title }, text);
}

function outcome({ kind, code, message }) {
  const [text, tone] = OUTCOMES.get(kind) ?? [`${visible(kind)} (code ${code})`, code ? "warn" : "good"];
  return badge(tone, text, message ? visible(message) : `exit code ${code}`);
}

// The report proves its own figures, or says that nobody has.
function ledger(run) {
  const { checks } = run.header, outside = run.tables.samples.outside_bytes.reduce((m, b) => Math.max(m, b), 0);
  const pool = run.header.meta.device.name.startsWith("cpu") ? "NumPy's allocations" : "the pool";
  const over = `${formatCount(checks.checked)} comparisons, ${formatCount(checks.events)} events`;
  if (!checks.checked) return h("span.badge.plain", { id: "ledger", title: over }, `ledger not compared with ${pool}`);
  const text = checks.drift_bytes ? `ledger differs from ${pool} by up to ${formatBytes(checks.drift_bytes)}` : `ledger = ${pool.replace(/^the /, "")}, drift 0 B over ${formatCount(checks.events)} events`;
  const also = outside > 0 ? `; up to ${formatBytes(outside)} taken from the pool by other code` : "";
  return h(`span.badge.${checks.drift_bytes ? "warn" : "good"}`, { id: "ledger", title: over, "data-bytes": checks.drift_bytes }, text + also);
}

function dropped(run) {
  const n = run.header.checks.dropped;
  return n ? badge("warn", `${plural(n, "event")} not kept`, "events of steps that were not recorded in full") : null;
}

function foldedNote(run) {
  const { count, bytes } = run.header.folded;
  if (!count) return null;
  return h("span.badge.warn", { id: "folded", "data-count": count, title: "they count in every sum and curve, but are neither drawn as rectangles nor listed one by one" },
    `the ${formatCount(run.allocCount)} largest allocations are drawn; ${formatCount(count)} smaller ones (${formatBytes(bytes)} in all) only counted`);
}

function mismatch(run) {
  const most = run.totals.reduce((m, total) => Math.max(m, total), 0), said = run.header.peak.bytes;
  return most === said ? null : badge("bad", `the file gives the peak as ${exactBytes(said)}, its events add up to ${exactBytes(most)}`);
}

function figure(label, value, ...notes) {
  return h("div.figure", {}, h("h2", {}, label), value, ...notes.filter(Boolean).map((note) => (typeof note === "string" ? h("p", {}, note) : note)));
}

function peakFigure(run) {
  const { bytes } = run.header.peak;
  return figure("Peak", h("p.value", { id: "peak", "data-bytes": bytes }, formatBytes(bytes)), h("p", {}, exactBytes(bytes)),
    run.count ? momentText(run, run.peakEvent) : "nothing was allocated");
}

function reservedFigure(run) {
  const bytes = run.header.peak.reserved_bytes;
  return figure("Reserved at the peak", h(bytes < 0 ? "p.value.unknown" : "p.value", { id: "reserved", "data-bytes": bytes }, bytes < 0 ? "not known" : formatBytes(bytes)),
    bytes < 0 ? "the pool was not asked" : exactBytes(bytes));
}

function deviceFigure(run) {
  const { device, limit_bytes: limit } = run.header.meta, peak = run.header.peak.bytes, all = device.total_bytes ?? 0;
  const bar = all > 0 ? h("div.meter", { role: "img", "aria-label": `${formatShare(peak, all)} of the device`, style: `--share: ${Math.min((100 * peak) / all, 100)}%` }) : null;
  return figure("Device", h("p.value.name", {}, visible(device.model || device.name)), bar,
    [device.model && device.model !== device.name ? visible(device.name) : "", all > 0 ? `peak is ${formatShare(peak, all)} of ${formatBytes(all)}` : "", limit > 0 ? `limit ${formatBytes(limit)}` : ""].filter(Boolean).join(" · "));
}

function stepFigure(run) {
  const { begin_ns, end_ns, reruns } = run.tables.steps, n = begin_ns.length;
  const times = Array.from(begin_ns, (begin, i) => end_ns[i] - begin).sort((a, b) => a - b);
  const again = reruns.reduce((sum, k) => sum + k, 0);
  return figure("Steps", h(n ? "p.value" : "p.value.unknown", {}, n ? formatCount(n) : "none marked"), n ? `${formatTime(times[n >> 1])} each (median)` : null, again ? plural(again, "rerun") : null);
}

/** What was alive when memory ran out; null for a run that did not run out. */
export function failurePanel(run, store) {
  const event = failure(run);
  if (event === null) return null;
  const { marks } = run.tables, i = marks.kind.lastIndexOf(run.header.mark_kinds.indexOf("oom")), { meta } = run.header;
  const { category } = run.alive(event), alive = [...category.keys()].filter((a) => category[a] >= 0);
  const largest = alive.sort((a, b) => run.allocs.bytes[b] - run.allocs.bytes[a]).slice(0, 5);
  return h("section.panel.failure", { id: "failure", "aria-labelledby": "failure-title" }, h("h2", { id: "failure-title" }, "Out of memory"),
    h("p", {}, visible(run.text(marks.text[i])) || visible(meta.outcome.message ?? "")),
    h("p", {}, h("strong", { id: "failure-total", "data-bytes": run.total(event) }, formatBytes(run.total(event))), ` (${exactBytes(run.total(event))}) was alive`,
      meta.limit_bytes ? `, the limit was ${formatBytes(meta.limit_bytes)}` : "", ` · ${momentText(run, event)}`),
    largest.length ? table("Largest at that moment", ["bytes", "category", "op", "line"], largest.map((a) => [
      formatBytes(run.allocs.bytes[a]), run.categories[category[a]], opText(run, a), placeText(run, run.allocs.stack[a])])) : null,
    h("p.actions", {}, h("button", { type: "button", onclick: () => moveCursor(store, run, event) }, "show what was alive then")));
}

export function footer(run) {
  const { meta } = run.header;
  const known = [["tapegrad", meta.tapegrad], ["Python", meta.python], ["NumPy", meta.numpy], ["CuPy", meta.cupy], ["platform", meta.platform], ["pool", meta.device.pool],
    ["process", meta.pid], ["threads", meta.threads], ["recorded", meta.created], ["stacks", meta.stacks], ["plan", meta.planned ? "applied" : ""]];
  return h("footer", {}, known.filter(([, v]) => v).map(([k, v]) => h("span", {}, `${k} ${visible(String(v))}`)));
}
