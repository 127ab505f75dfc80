// Exports the timers that match the filter to a file: pages through the API, up to a limit; can be stopped.

import * as api from "./api.js";
import { button, dialog, el, number, plural, say } from "./dom.js";

export const ROWS_MAX = 100_000;
const PAGE = 1_000;
const COLUMNS = [
  "namespace",
  "id",
  "status",
  "executeAt",
  "fireAt",
  "executedAt",
  "callbackUrl",
  "callbackSubject",
  "correlationId",
  "attempts",
  "lastError",
  "payload",
  "metadata",
  "createdAt",
  "updatedAt",
];

// A spreadsheet would run a cell that starts like a formula: a leading quote keeps it text.
export function cell(value) {
  let text =
    value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value);
  if (/^[=+\-@\t\r]/.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

const csv = (timers) => timers.map((timer) => `${COLUMNS.map((name) => cell(timer[name])).join(",")}\r\n`).join("");

function save(parts, type, name) {
  const link = el("a", { href: URL.createObjectURL(new Blob(parts, { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

export async function exportTimers(filters, kind) {
  const count = await api.get(`/timers/count?${api.query(filters)}`);
  if (!count.timers && !count.estimated) return say("No timers match the filter: nothing to export.");
  const total = Math.min(count.timers, ROWS_MAX);
  const exact = !count.more && !count.estimated;
  const bar = el("progress", { max: exact ? String(total) : null, "aria-label": "Exported so far" });
  if (exact) bar.value = 0;
  const line = el("p", { "aria-live": "off" }, "Starting …");
  const stop = new AbortController();
  const shown = dialog(`Export as ${kind.toUpperCase()}`, [bar, line], [], { cancel: "Stop" });
  shown.then(() => stop.abort());
  const parts = kind === "csv" ? [`${COLUMNS.join(",")}\r\n`] : ["[\n"];
  let rows = 0;
  try {
    let cursor = null;
    do {
      const page = await api.getExact(`/timers?${api.query({ ...filters, limit: PAGE, cursor })}`, stop.signal);
      const timers = page.timers.slice(0, ROWS_MAX - rows);
      if (timers.length)
        parts.push(
          kind === "csv"
            ? csv(timers)
            : `${rows ? ",\n" : ""}${timers.map((timer) => JSON.stringify(timer)).join(",\n")}`,
        );
      rows += timers.length;
      cursor = page.nextCursor;
      if (exact) bar.value = rows;
      line.textContent = `${number(rows)} of ${count.estimated ? "~" : ""}${number(total)}${count.more ? " or more" : ""}`;
    } while (cursor && rows < ROWS_MAX);
  } catch (error) {
    if (error.name === "AbortError") return say("Export stopped. No file was saved.");
    shown.close();
    return say(error.message, "bad");
  }
  shown.close();
  if (kind === "json") parts.push("\n]\n");
  save(parts, kind === "csv" ? "text/csv;charset=utf-8" : "application/json", `timers.${kind}`);
  return say(
    `Exported ${plural(rows, "timer")}${rows === ROWS_MAX ? ", the maximum per export. More may match the filter" : ""}.`,
  );
}

export const exportButtons = (filters) => [
  button("Export CSV", () => exportTimers(filters(), "csv")),
  button("Export JSON", () => exportTimers(filters(), "json")),
];
