// The overview, live: punctuality, throughput, forecast, failures and shard owners.

import { lists, ownClocks } from "./abilities.js";
import * as api from "./api.js";
import { chart } from "./chart.js";
import { badge, become, counted, el, meaning, number, plural, section, title } from "./dom.js";
import { firstTimer } from "./first.js";
import { follows, onPulse } from "./live.js";
import { local, now, relative, setNow, span, utc } from "./time.js";

const STATUSES = ["pending", "executing", "completed", "failed", "canceled"];
const RECENT_MS = 5 * 60_000;
const LATE_MS = 1_000;
// Why timers wait, as in duetime/overdue.py. Operators have to fix the ALARMS.
const REASONS = {
  paused: "in paused namespaces",
  destination: "for destinations that are full, slow or do not respond",
  no_owner: "in shards without an owner",
  behind: "because the instances do not keep up",
  store: "because the store is slow or does not respond",
};
const ALARMS = ["no_owner", "behind", "store"];

const seconds = (text) => Date.parse(text) / 1_000;
const perSecond = (value) => (value === null || value === undefined ? "–" : `${number(Math.round(value * 10) / 10)}/s`);
const ms = (value) => (value === null || value === undefined ? "–" : span(value));
const last = (values) => values.findLast((value) => value !== null);
const alarming = (reasons) => ALARMS.some((reason) => reasons[reason]);

// Instances report every few seconds, so a reported pause or slow destination may be over by now.
const why = ({ overdue, overdueReasons: reasons }) =>
  overdue.timers || alarming(reasons)
    ? Object.keys(REASONS)
        .filter((reason) => reasons[reason])
        .map((reason) => `${number(reasons[reason])} ${REASONS[reason]}`)
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
    heading: "Attempts per second",
    lines: [{ label: "Attempts per second", color: "accent", text: perSecond }],
    summary: ([, values]) =>
      values.length
        ? `Now ${perSecond(values.at(-1))}, peak ${perSecond(Math.max(...values))}.`
        : "No data yet.",
    signal,
  });
  const lateness = chart({
    heading: "Lateness",
    unit: "ms",
    lines: [
      { label: "p99", color: "warn", text: ms },
      { label: "p50", color: "good", text: ms },
    ],
    summary: ([, p99, p50]) =>
      last(p50) === undefined
        ? "No attempts in the last hour."
        : `Latest: p50 ${ms(last(p50))}, p99 ${ms(last(p99))}.`,
    signal,
  });
  const about = (name) => (shown.forecast[name].some((bar) => bar.estimated) ? "~" : "");
  const forecasts = [
    ["hour", "Due in the next hour, by minute"],
    ["day", "Due in the next day, by hour"],
  ].map(([name, heading]) => [
    name,
    chart({
      heading,
      bars: true,
      lines: [{ label: "Timers", color: "accent", text: (value) => `${about(name)}${plural(value ?? 0, "timer")}` }],
      summary: ([, values]) => {
        const timers = values.reduce((sum, value) => sum + value, 0);
        const more = shown.forecast[name].some((bar) => bar.more);
        const many = `${more ? "More than " : ""}${about(name)}${plural(timers, "timer")}`;
        return `${many} fall${timers === 1 ? "s" : ""} due${about(name) && " (estimate)"}.`;
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
    el(
      "div",
      { class: "two" },
      seen.failures && section("Failures by destination", failures),
      section("Shard owners", owners),
    ),
  );
  if (empty) welcome.replaceChildren(firstTimer());

  let activity = [];
  const drawActivity = () => {
    const at = activity.map((point) => seconds(point.at));
    fires.set([at, activity.map((point) => point.firesPerSecond)]);
    lateness.set([at, activity.map((point) => point.latenessP99Ms), activity.map((point) => point.latenessP50Ms)]);
  };
  const drawTiles = ({ statuses, estimated }) => {
    const tile = (count, filters, inside, more) => {
      const [tag, href] = lists(filters) ? ["a", `#/timers?${api.query(filters)}`] : ["div", null];
      const many = el("strong", { title: meaning(count) }, counted(count));
      return el("li", {}, el(tag, { class: `tile ${more}`, href }, many, inside));
    };
    const fresh = [
      ...STATUSES.map((status) => tile({ timers: statuses[status] ?? 0, estimated }, { status }, badge(status), status)),
      tile(
        shown.overdue,
        { status: "pending", executeBefore: utc(now()) },
        el(
          "span",
          {},
          el("span", { class: "badge" }, "overdue"),
          ...why(shown).map((text) => el("span", { class: "muted block" }, text)),
        ),
        alarming(shown.overdueReasons) ? "late" : "",
      ),
    ];
    if (tiles.children.length) fresh.forEach((one, at) => become(tiles.children[at], one));
    else tiles.append(...fresh);
  };
  const draw = () => {
    activity = shown.activity;
    drawActivity();
    drawTiles(shown);
    verdict.replaceChildren(...judged(shown));
    for (const [name, drawn] of forecasts) {
      const bars = shown.forecast[name];
      drawn.set([bars.map((bar) => seconds(bar.at)), bars.map((bar) => bar.timers)]);
    }
    if (shown.failures) failures.replaceChildren(failed(shown.failures));
    owners.replaceChildren(...owned(shown).filter(Boolean));
  };
  draw();

  onPulse((pulse) => {
    drawTiles(pulse);
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
      // The header shows the lost connection; the next round tries again.
    }
  }, seen.stepSeconds * 1_000);
  signal.addEventListener("abort", () => clearInterval(every));
}

// The verdict: a word and a sentence.
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
    ? `About ${plural(fired, "attempt")} in the last 5 minutes: half started within ${span(p50)} of their due time, 99% within ${span(p99)}.`
    : "No attempts in the last 5 minutes.";
  const away = instances.filter((instance) => !instance.serving).length;
  const says = (kind, word, text) => [
    el("p", { class: `word ${kind}` }, word),
    el("p", { title: meaning(overdue) }, text),
  ];
  if (unowned.length) {
    return says(
      "bad",
      "Partly stopped",
      `${number(unowned.length)} of ${plural(shards, "shard")} ${unowned.length === 1 ? "has" : "have"} no owner: their timers wait until an instance claims them.${overdueSays}`,
    );
  }
  if (away)
    return says(
      "bad",
      "Partly stopped",
      `${plural(away, "instance")} can't serve: ${away === 1 ? "its clock is" : "their clocks are"} too far off the store's clock. ${firedSays}${overdueSays}`,
    );
  if (alarming(reasons)) return says("warn", "Behind", firedSays + overdueSays);
  if (overdue.timers && reasons.destination) return says("calm", "Some timers are waiting", firedSays + overdueSays);
  if (p99 > LATE_MS) return says("warn", "Running late", firedSays + overdueSays);
  return fired ? says("good", "On time", firedSays + overdueSays) : says("calm", "Quiet", firedSays + overdueSays);
}

function failed({ of, destinations }) {
  if (!destinations.length)
    return el("p", { class: "empty" }, "No failed timers.");
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
      `Based on the latest ${plural(of, "failed timer")}. `,
      el("a", { href: "#/timers?status=failed" }, "View all failed timers"),
    ),
  );
}

// Shard numbers as ranges: 0–15, 20.
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
      el("td", {}, instance.serving ? "serving" : "clock wrong"),
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
      unowned.length ? `Shards without an owner: ${ranges(unowned)}.` : "Every shard has an owner.",
    ),
    ownClocks() &&
      el(
        "p",
        { class: "muted" },
        "Each instance uses its own machine's clock to decide which timers are due. Synchronize the clocks with NTP.",
      ),
  ];
}
