// The overview: is it on time, what fires, what is due, what failed and who owns what. Live.

import * as api from "./api.js";
import { chart } from "./chart.js";
import { badge, counted, el, number, plural, section, title } from "./dom.js";
import { firstTimer } from "./first.js";
import { follows, onPulse } from "./live.js";
import { local, now, relative, setNow, span, utc } from "./time.js";

const STATUSES = ["pending", "executing", "completed", "failed", "canceled"];
const RECENT_MS = 5 * 60_000;
const LATE_MS = 1_000;
// Why timers are overdue. A pause and a slow destination are named; the others are for operators to mend.
const REASONS = {
  paused: (count) => `${number(count)} held by a pause`,
  destination: (count) => `${number(count)} wait${count === 1 ? "s" : ""} for destinations that can't take more`,
  no_owner: (count) => `${number(count)} ${count === 1 ? "has" : "have"} no owner`,
  behind: (count) => `${number(count)} wait${count === 1 ? "s" : ""} because this service is behind`,
  store: () => "the store is slow",
};
const ALARMS = ["no_owner", "behind", "store"];

const seconds = (text) => Date.parse(text) / 1_000;
const perSecond = (value) => (value === null || value === undefined ? "–" : `${number(Math.round(value * 10) / 10)}/s`);
const ms = (value) => (value === null || value === undefined ? "–" : span(value));
const last = (values) => values.findLast((value) => value !== null);
const alarming = (reasons) => ALARMS.some((reason) => reasons[reason]);

// Instances report every few seconds: what they say of a pause or a destination may be over by now.
const why = ({ overdue, overdueReasons: reasons }) =>
  overdue.timers || alarming(reasons)
    ? Object.keys(REASONS)
        .filter((reason) => reasons[reason])
        .map((reason) => REASONS[reason](reasons[reason]))
    : [];

export async function show(main, _, signal) {
  const seen = await api.get("/overview", signal);
  setNow(seen.now);
  let shown = seen;
  const empty = STATUSES.every((status) => !seen.statuses[status]);
  const verdict = el("div", { class: "verdict card" });
  const tiles = el("ul", { class: "tiles", "aria-label": "Timers by status" });
  const welcome = el("div");
  const fires = chart({
    heading: "Fires per second",
    lines: [{ label: "Fires per second", colour: "accent", text: perSecond }],
    summary: ([, values]) =>
      values.length
        ? `Now ${perSecond(values.at(-1))}, at most ${perSecond(Math.max(...values))}.`
        : "Nothing measured yet.",
    signal,
  });
  const lateness = chart({
    heading: "Lateness",
    unit: "ms",
    lines: [
      { label: "p99", colour: "warn", text: ms },
      { label: "p50", colour: "good", text: ms },
    ],
    summary: ([, p99, p50]) =>
      last(p50) === undefined
        ? "Nothing fired yet."
        : `Latest: half within ${ms(last(p50))}, 99 % within ${ms(last(p99))}.`,
    signal,
  });
  const forecasts = [
    ["hour", "Due in the next hour, by minute"],
    ["day", "Due in the next day, by hour"],
  ].map(([name, heading]) => [
    name,
    chart({
      heading,
      bars: true,
      lines: [{ label: "Timers", colour: "accent", text: (value) => plural(value ?? 0, "timer") }],
      summary: ([, values]) => {
        const timers = values.reduce((sum, value) => sum + value, 0);
        const more = shown.forecast[name].some((bar) => bar.more);
        return `${more ? "More than " : ""}${plural(timers, "timer")} fall${timers === 1 ? "s" : ""} due.`;
      },
      day: name === "day",
      signal,
    }),
  ]);
  const failures = el("div");
  const owners = el("div");
  main.replaceChildren(
    title("Overview"),
    verdict,
    welcome,
    tiles,
    el("div", { class: "two" }, el("div", { class: "card" }, fires.node), el("div", { class: "card" }, lateness.node)),
    el("div", { class: "two" }, ...forecasts.map(([, drawn]) => el("div", { class: "card" }, drawn.node))),
    el("div", { class: "two" }, section("Failures by destination", failures), section("Who owns which shard", owners)),
  );
  if (empty) welcome.replaceChildren(firstTimer());

  let activity = [];
  const drawActivity = () => {
    const at = activity.map((point) => seconds(point.at));
    fires.set([at, activity.map((point) => point.firesPerSecond)]);
    lateness.set([at, activity.map((point) => point.latenessP99Ms), activity.map((point) => point.latenessP50Ms)]);
  };
  const drawTiles = (statuses) => {
    const link = (text, filters, inside, more) =>
      el(
        "li",
        {},
        el("a", { class: `tile ${more}`, href: `#/timers?${api.query(filters)}` }, el("strong", {}, text), inside),
      );
    tiles.replaceChildren(
      ...STATUSES.map((status) => link(number(statuses[status] ?? 0), { status }, badge(status), status)),
      link(
        counted(shown.overdue),
        { status: "pending", executeBefore: utc(now()) },
        el(
          "span",
          {},
          el("span", { class: "badge" }, "overdue"),
          ...why(shown).map((text) => el("span", { class: "muted block" }, text)),
        ),
        alarming(shown.overdueReasons) ? "late" : "",
      ),
    );
  };
  const draw = () => {
    activity = shown.activity;
    drawActivity();
    drawTiles(shown.statuses);
    verdict.replaceChildren(...judged(shown));
    for (const [name, drawn] of forecasts) {
      const bars = shown.forecast[name];
      drawn.set([bars.map((bar) => seconds(bar.at)), bars.map((bar) => bar.timers)]);
    }
    failures.replaceChildren(failed(shown.failures));
    owners.replaceChildren(...owned(shown));
  };
  draw();

  onPulse((pulse) => {
    drawTiles(pulse.statuses);
    if (pulse.activity && pulse.activity.at !== activity.at(-1)?.at) {
      activity = [...activity.slice(-719), pulse.activity];
      drawActivity();
    }
    if (STATUSES.some((status) => pulse.statuses[status])) welcome.replaceChildren();
  }, signal);
  const every = setInterval(async () => {
    if (!follows()) return;
    try {
      shown = await api.get("/overview", signal);
      draw();
    } catch {
      // The header says that the connection is lost; the next round tries again.
    }
  }, seen.stepSeconds * 1_000);
  signal.addEventListener("abort", () => clearInterval(every));
}

// Is it on time? A word and a sentence.
function judged(seen) {
  const { activity, overdue, overdueReasons: reasons, unowned, shards, instances, stepSeconds, now: at } = seen;
  const recent = activity.filter((point) => Date.parse(point.at) > Date.parse(at) - RECENT_MS);
  const fired = Math.round(recent.reduce((sum, point) => sum + point.firesPerSecond * stepSeconds, 0));
  const worst = (name) => Math.max(0, ...recent.map((point) => point[name] ?? 0));
  const p50 = worst("latenessP50Ms");
  const p99 = worst("latenessP99Ms");
  const because = why(seen).join("; ");
  const overdueSays = overdue.timers
    ? ` ${counted(overdue)} ${overdue.timers === 1 ? "timer is" : "timers are"} overdue${because && `: ${because}`}.`
    : ` ${because ? `Overdue: ${because}` : "Nothing is overdue"}.`;
  const firedSays = fired
    ? `In the last 5 minutes about ${plural(fired, "timer")} fired: half of them within ${span(p50)} of their time, 99 % within ${span(p99)}.`
    : "Nothing fired in the last 5 minutes.";
  const away = instances.filter((instance) => !instance.serving).length;
  const says = (kind, word, text) => [el("p", { class: `word ${kind}` }, word), el("p", {}, text)];
  if (unowned.length) {
    return says(
      "bad",
      "Part of it waits",
      `${number(unowned.length)} of ${plural(shards, "shard")} ${unowned.length === 1 ? "has" : "have"} no owner: their timers wait until an instance claims them.${overdueSays}`,
    );
  }
  if (away)
    return says(
      "bad",
      "Part of it waits",
      `${plural(away, "instance")} can't serve: its clock is too far off the store's. ${firedSays}${overdueSays}`,
    );
  if (alarming(reasons)) return says("warn", "Behind", firedSays + overdueSays);
  if (overdue.timers && reasons.destination) return says("calm", "Some timers wait", firedSays + overdueSays);
  if (p99 > LATE_MS) return says("warn", "Running late", firedSays + overdueSays);
  return fired ? says("good", "On time", firedSays + overdueSays) : says("calm", "Quiet", firedSays + overdueSays);
}

function failed({ of, destinations }) {
  if (!destinations.length)
    return el("p", { class: "empty" }, "No timer has failed. When one does, its destination and the reason are here.");
  const rows = destinations.map((one) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", class: "break" }, one.destination.replace(/^(https:.*):443$|^(http:.*):80$/, "$1$2")),
      el("td", { class: "right" }, number(one.timers)),
      el(
        "td",
        { class: "break" },
        one.lastError ?? "–",
        el("span", { class: "muted block", title: local(one.lastAt) }, relative(one.lastAt)),
      ),
    ),
  );
  return el(
    "div",
    {},
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, "Failed timers by destination, most first"),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col", class: "half" }, "Destination"),
          el("th", { scope: "col", class: "right" }, "Failed"),
          el("th", { scope: "col" }, "Latest error"),
        ),
      ),
      el("tbody", {}, ...rows),
    ),
    el(
      "p",
      { class: "muted" },
      `Of the latest ${number(of)} failed timers. `,
      el("a", { href: "#/timers?status=failed" }, "All failed timers"),
    ),
  );
}

// Shards as 0–15, 20.
function ranges(shards) {
  const found = [];
  for (const shard of [...shards].sort((a, b) => a - b)) {
    if (found.length && found.at(-1)[1] === shard - 1) found.at(-1)[1] = shard;
    else found.push([shard, shard]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ") || "none";
}

function owned({ instances, unowned, shards }) {
  const owner = new Map(instances.flatMap((instance, at) => instance.shards.map((shard) => [shard, at])));
  const cells = Array.from({ length: shards }, (_, shard) => {
    const at = owner.get(shard);
    return el("span", {
      class: at === undefined ? "cell none" : `cell owner-${at % 8}`,
      title: `shard ${shard}: ${at === undefined ? "no owner" : instances[at].name}`,
    });
  });
  const rows = instances.map((instance, at) =>
    el(
      "tr",
      {},
      el(
        "th",
        { scope: "row", class: "break" },
        el("span", { class: `cell owner-${at % 8}`, "aria-hidden": "true" }),
        ` ${instance.name}`,
      ),
      el("td", {}, instance.serving ? "serving" : "not serving"),
      el("td", { class: "right" }, number(instance.shards.length)),
      el("td", { class: "break" }, ranges(instance.shards)),
    ),
  );
  return [
    el("div", { class: "map", "aria-hidden": "true" }, ...cells),
    el(
      "table",
      {},
      el("caption", { class: "unseen" }, "Instances and the shards that each owns"),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          ...[["Instance"], ["State"], ["Owns", "right"], ["Shards"]].map(([text, kind]) =>
            el("th", { scope: "col", class: kind }, text),
          ),
        ),
      ),
      el("tbody", {}, ...rows),
    ),
    el(
      "p",
      { class: unowned.length ? "bad" : "muted" },
      unowned.length ? `Nobody owns ${ranges(unowned)}.` : "Every shard has an owner.",
    ),
  ];
}
