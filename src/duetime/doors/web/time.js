// Times and durations as text. "Now" is the service's clock, which decides when a timer fires.

let offset = 0;

// A difference of a second or two comes from the age of the response, not from the clock.
export const setNow = (text) => {
  const apart = Date.parse(text) - Date.now();
  offset = Math.abs(apart) < 2_500 ? 0 : apart;
};
export const now = () => Date.now() + offset;

export const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "local time";

const two = (value) => String(value).padStart(2, "0");

const day = (date) => `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;

export const clock = (ms, seconds = true) => {
  const date = new Date(ms);
  return `${two(date.getHours())}:${two(date.getMinutes())}${seconds ? `:${two(date.getSeconds())}` : ""}`;
};

// 2026-12-01 14:30:00 in the browser's time zone.
export const local = (when) => {
  const date = new Date(when);
  return `${day(date)} ${clock(date.getTime())}`;
};

export const precise = (when) => `${local(when)}.${String(new Date(when).getMilliseconds()).padStart(3, "0")}`;

export const utc = (when) => new Date(when).toISOString();

// UTC+1, UTC-3:30 at an instant.
export const offsetAt = (when) => {
  const minutes = -new Date(when).getTimezoneOffset();
  const rest = Math.abs(minutes) % 60;
  return `UTC${minutes < 0 ? "-" : "+"}${Math.floor(Math.abs(minutes) / 60)}${rest ? `:${two(rest)}` : ""}`;
};

export const zoneAt = (when) => (zone === "UTC" ? zone : `${zone} (${offsetAt(when)})`);

const UNITS = [
  ["d", 86_400_000, "day"],
  ["h", 3_600_000, "hour"],
  ["m", 60_000, "minute"],
  ["s", 1_000, "second"],
  ["ms", 1, "millisecond"],
];
const DURATION = new RegExp(`^${UNITS.map(([unit]) => `(?:(\\d{1,15})${unit})?`).join("")}$`);

// Milliseconds of 500ms, 30s, 1h30m, as the API writes durations; null for anything else.
export function durationMs(text) {
  const match = text ? DURATION.exec(text) : null;
  return match && UNITS.reduce((sum, [, size], at) => sum + (match[at + 1] ? Number(match[at + 1]) * size : 0), 0);
}

export function durationText(ms) {
  let left = Math.round(ms);
  let text = "";
  for (const [unit, size] of UNITS) {
    const count = Math.floor(left / size);
    left -= count * size;
    if (count) text += `${count}${unit}`;
  }
  return text || "0s";
}

// 12 ms, 3.4 s, 5 minutes, 2 days 3 hours: rounded for reading.
export function span(ms) {
  const long = Math.abs(ms);
  if (long < 1_000) return `${Math.round(long)} ms`;
  if (long < 60_000) return `${(long / 1_000).toFixed(long < 10_000 ? 1 : 0).replace(/\.0$/, "")} s`;
  const at = UNITS.findIndex(([, size]) => long >= size);
  const [, size, name] = UNITS[at];
  const count = Math.floor(long / size);
  const [, finer, finerName] = UNITS[at + 1];
  const rest = Math.floor((long - count * size) / finer);
  const one = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
  return rest && count < 10 ? `${one(count, name)} ${one(rest, finerName)}` : one(count, name);
}

const told = (when, say) => {
  const ms = Date.parse(when) - now();
  if (Math.abs(ms) < 1_000) return "now";
  return ms > 0 ? `in ${say(ms)}` : `${say(ms)} ago`;
};
export const relative = (when) => told(when, span);

// The same in one unit, for columns.
export const about = (when) =>
  told(when, (ms) =>
    span(ms)
      .replace(/^(\d+ \w+) .*/, "$1")
      .replace(/\.\d+/, ""),
  );

// --- parsing input ----------------------------------------------------------------------------------------------------

const WORDS = { a: 1, an: 1, one: 1, two: 2, three: 3, half: 0.5 };
const SIZES = {
  w: 604_800_000,
  week: 604_800_000,
  sec: 1_000,
  min: 60_000,
  hr: 3_600_000,
  mins: 60_000,
  secs: 1_000,
  hrs: 3_600_000,
};
for (const [unit, size, name] of UNITS) SIZES[unit] = SIZES[name] = size;
const DAYS = ["sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"];
const CLOCK = /^(?:at\s+)?(?:(\d{1,2})(?::(\d{2}))?(?::(\d{2}))?\s*(am|pm)?|(noon|midnight))$/;
const DATE = /^(\d{4})-(\d{2})-(\d{2})(?:[t\s]+(?:at\s+)?(.+))?$/;
const STAMP = /^\d{4}-\d{2}-\d{2}[t\s]\d{1,2}:\d{2}(:\d{2}(\.\d{1,9})?)?\s*(z|utc|[+-]\d{2}:?\d{2})$/;
const YEARS_MAX_MS = 36_525 * 86_400_000;

export const EXAMPLES = ["in 10 minutes", "in 1 hour", "tomorrow 9:00", "monday 8:30"];

const wrong = (error) => ({ error });

// Parses input to { at, delay, note } or { error }. A relative time sets `delay`: the service then counts from its own
// clock, so a wrong clock in the browser can't make the timer fire early or late.
export function parseWhen(typed) {
  const text = typed.trim().toLowerCase().replaceAll(/\s+/g, " ");
  if (!text) return wrong("Enter a time, such as “in 10 minutes”, “tomorrow 9:00” or “2026-12-01 14:30”.");
  if (text === "now") return { at: now(), delay: "0s" };
  if (STAMP.test(text)) return stamped(text);
  const date = DATE.exec(text);
  if (date) return dated(date);
  const timeOfDay = CLOCK.exec(text);
  if (timeOfDay && (timeOfDay[2] || timeOfDay[4] || timeOfDay[5])) return onDay(0, timeOfDay, 1);
  const [first, ...rest] = text.replace(/^(on|next) /, "").split(" ");
  const days = dayAhead(first);
  if (days !== null) {
    const time = CLOCK.exec(rest.join(" "));
    if (!time) return wrong(`Add a time of day, such as “${first} 9:00”.`);
    return onDay(days, time, first === "today" || first === "tomorrow" ? 0 : 7);
  }
  return fromNow(text);
}

function fromNow(text) {
  let ms = 0;
  let left = text
    .replace(/^in /, "")
    .replaceAll(/\b(and|of)\b|,/g, " ")
    .replaceAll(/\bhalf an?\b/g, "half")
    .trim();
  const part = /^(\d+(?:\.\d+)?|[a-z]+)\s*([a-z]+?)(?=\d|\s|$)\s*/;
  while (left) {
    const match = part.exec(left);
    const count = match && (WORDS[match[1]] ?? Number(match[1]));
    const size = match && (SIZES[match[2]] ?? SIZES[match[2].replace(/s$/, "")]);
    if (!match || Number.isNaN(count) || !size) {
      return wrong("Not a valid time. Try “in 10 minutes”, “tomorrow 9:00”, “monday 8:30” or “2026-12-01 14:30”.");
    }
    ms += count * size;
    left = left.slice(match[0].length);
  }
  if (ms > YEARS_MAX_MS) return wrong("Must be at most 100 years from now.");
  return { at: now() + ms, delay: durationText(ms) };
}

function stamped(text) {
  const at = Date.parse(
    text
      .toUpperCase()
      .replace(" ", "T")
      .replace(/\s*UTC$/, "Z")
      .replace(/\s+/, ""),
  );
  return Number.isNaN(at) ? wrong("This date does not exist.") : ahead(at);
}

function dated([, year, month, dayOfMonth, rest]) {
  const time = rest && CLOCK.exec(rest);
  if (!time) return wrong(`Add a time of day, such as “${year}-${month}-${dayOfMonth} 14:30”.`);
  const date = new Date(Number(year), Number(month) - 1, Number(dayOfMonth));
  if (date.getMonth() !== Number(month) - 1) return wrong("This date does not exist.");
  return at(date, time);
}

function dayAhead(word) {
  if (word === "today") return 0;
  if (word === "tomorrow") return 1;
  const named = word.length >= 3 ? DAYS.findIndex((name) => name.startsWith(word)) : -1;
  return named < 0 ? null : (named - new Date(now()).getDay() + 7) % 7;
}

// That many days from today, or `further` days later if that is already past (0: never).
function onDay(days, time, further) {
  const today = new Date(now());
  const date = new Date(today.getFullYear(), today.getMonth(), today.getDate() + days);
  const found = at(date, time);
  if (!found.past || !further) return found;
  date.setDate(date.getDate() + further);
  return at(date, time);
}

function at(date, [, hours, minutes, seconds, half, word]) {
  let hour = word === "noon" ? 12 : word === "midnight" ? 0 : Number(hours);
  if (half && (hour < 1 || hour > 12)) return wrong("With am or pm the hour must be from 1 to 12.");
  if (half) hour = (hour % 12) + (half === "pm" ? 12 : 0);
  if (hour > 23 || Number(minutes ?? 0) > 59 || Number(seconds ?? 0) > 59) return wrong("Not a valid time of day.");
  const when = new Date(
    date.getFullYear(),
    date.getMonth(),
    date.getDate(),
    hour,
    Number(minutes ?? 0),
    Number(seconds ?? 0),
  );
  const time = `${two(hour)}:${two(minutes ?? 0)}`;
  let note = null;
  if (when.getHours() !== hour) note = `Clocks go forward: ${time} does not exist on that day.`;
  else if (new Date(when.getTime() + 3_600_000).getHours() === hour) {
    note = `Clocks go back: ${time} happens twice on that day; this is the first time.`;
  }
  return { ...ahead(when.getTime()), note };
}

function ahead(at) {
  return at > now() ? { at, delay: null } : { at, past: true, error: `This time is in the past: ${local(at)}.` };
}
