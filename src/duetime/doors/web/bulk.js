// Cancels or replays every timer that matches the filter: shows the count first, then works in steps that can be stopped.

import * as api from "./api.js";
import { counted, dialog, el, meaning, number, plural, say } from "./dom.js";

const STEP = 500;
const TOTAL_MAX = 100_000;
const DOES = {
  cancel: {
    heading: "Cancel timers",
    verb: "Cancel",
    done: "Canceled",
    answer: "canceled",
    most: ({ timers, more, estimated }) => (more || estimated ? TOTAL_MAX : timers),
    says: (n) => `${n} will not fire unless you replay ${n === "It" ? "it" : "them"}. Canceled timers stay in the list.`,
  },
  replay: {
    heading: "Replay timers",
    verb: "Replay",
    done: "Replayed",
    answer: "replayed",
    // A replayed timer can fail again at once and match the filter again, so a replay ends after as many as were counted.
    most: ({ timers, more, estimated }) => (more ? TOTAL_MAX : Math.max(timers, estimated ? STEP : 0)),
    says: (n) => `${n} will fire again now, each with a new delivery id.`,
  },
};

const worded = ({ namespace, status, correlationId, executeAfter, executeBefore }) =>
  [
    ["Status", status],
    ["Namespace", namespace || "all"],
    ["Correlation id", correlationId],
    ["Scheduled at or after", executeAfter],
    ["Scheduled before", executeBefore],
  ].filter(([, value]) => value);

export async function bulk(kind, filters) {
  const does = DOES[kind];
  let count;
  try {
    count = await api.get(`/timers/count?${api.query(filters)}`);
  } catch (error) {
    return say(error.message, "bad");
  }
  if (!count.timers && !count.estimated) return say(`No ${filters.status} timers match the filter: nothing to ${kind}.`);
  const most = does.most(count);
  const about = count.estimated ? "~" : "";
  const many = `${count.more ? "More than " : ""}${about}${plural(count.timers, `${filters.status} timer`)}`;
  const one = count.timers === 1 && !count.more;
  const bar = el("progress", { max: String(most), hidden: true, "aria-label": `${does.done} so far` });
  const line = el("p", { role: "status" });
  const stop = new AbortController();
  let done = 0;
  let spent = 0; // How many were changed, counting those of a replay whose response was lost.

  const act = async () => {
    bar.hidden = false;
    bar.value = 0;
    const { namespace, correlationId, executeAfter, executeBefore, status } = filters;
    const asked = Object.fromEntries(
      Object.entries({ namespace: namespace || "*", correlationId, executeAfter, executeBefore }).filter(
        ([, value]) => value,
      ),
    );
    if (kind === "replay") asked.status = status;
    let limit = 0;
    try {
      let more = true;
      while (more && spent < most && !stop.signal.aborted) {
        limit = Math.min(STEP, most - spent);
        const answer = await api.post(`/timers/${kind}`, { ...asked, limit }, stop.signal);
        done += answer[does.answer];
        spent += answer[does.answer];
        more = answer.more;
        bar.value = done;
        line.textContent = `${does.done} ${number(done)} of ${counted(count)}. Close this dialog to stop.`;
      }
      return true;
    } catch (error) {
      const unknown = error.status === 0 || error.status >= 500;
      if (unknown && kind === "replay") spent += limit;
      const lost = unknown ? ` Up to ${number(limit)} more may have been ${does.answer}.` : "";
      if (!stop.signal.aborted) line.textContent = `Stopped after ${plural(done, "timer")}. ${error.message}${lost}`;
      return stop.signal.aborted;
    }
  };
  await dialog(
    does.heading,
    [
      el("p", {}, el("strong", { title: meaning(count) }, many), ` ${one ? "matches" : "match"} the filter:`),
      el(
        "dl",
        { class: "facts" },
        ...worded(filters).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
      ),
      el("p", {}, does.says(one ? "It" : "They")),
      bar,
      line,
    ],
    [["go", `${does.verb} ${counted(count)}`, kind === "cancel" ? "danger" : "main"]],
    { act },
  );
  stop.abort();
  if (done) say(`${does.done} ${plural(done, "timer")}.`);
  return done;
}
