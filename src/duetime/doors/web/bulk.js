// Cancel or replay everything that is filtered: first it is counted and said, then done in steps that can be stopped.

import * as api from "./api.js";
import { counted, dialog, el, number, plural, say } from "./dom.js";

const STEP = 500;
const TOTAL_MAX = 100_000;
const DOES = {
  cancel: {
    heading: "Cancel timers",
    verb: "Cancel",
    done: "Canceled",
    answer: "canceled",
    says: (n) => `${n} will never fire, unless you replay them. They stay in the list as canceled.`,
  },
  replay: {
    heading: "Replay timers",
    verb: "Replay",
    done: "Replayed",
    answer: "replayed",
    says: (n) => `${n} will be called once more, now. Receivers get them as new deliveries.`,
  },
};

const worded = ({ namespace, status, correlationId, executeAfter, executeBefore }) =>
  [
    ["Status", status],
    ["Namespace", namespace || "all"],
    ["Correlation id", correlationId],
    ["Due at or after", executeAfter],
    ["Due before", executeBefore],
  ].filter(([, value]) => value);

export async function bulk(kind, filters) {
  const does = DOES[kind];
  let count;
  try {
    count = await api.get(`/timers/count?${api.query(filters)}`);
  } catch (error) {
    return say(error.message, "bad");
  }
  if (!count.timers) return say(`No ${filters.status} timer fits the filter: there is nothing to ${kind}.`);
  const most = count.more ? TOTAL_MAX : count.timers;
  const many = `${count.more ? "More than " : ""}${plural(count.timers, `${filters.status} timer`)}`;
  const bar = el("progress", { max: String(most), hidden: true, "aria-label": `${does.done} so far` });
  const line = el("p", { role: "status" });
  const stop = new AbortController();
  let done = 0;
  let spent = 0; // What was done, and what a replay whose answer was lost may have done.

  const act = async () => {
    bar.hidden = false;
    bar.value = 0;
    const { namespace, correlationId, executeAfter, executeBefore, status } = filters;
    const asked = Object.fromEntries(
      Object.entries({ namespace, correlationId, executeAfter, executeBefore }).filter(([, value]) => value),
    );
    if (kind === "replay") asked.status = status;
    let limit = 0;
    try {
      let more = true;
      // What is replayed can fail again at once and would then be found again: no more than were counted.
      while (more && spent < most && !stop.signal.aborted) {
        limit = Math.min(STEP, most - spent);
        const answer = await api.post(`/timers/${kind}`, { ...asked, limit }, stop.signal);
        done += answer[does.answer];
        spent += answer[does.answer];
        more = answer.more;
        bar.value = done;
        line.textContent = `${does.done} ${number(done)} of ${counted(count)}. Close this to stop.`;
      }
      return true;
    } catch (error) {
      const unknown = error.status === 0 || error.status >= 500;
      if (unknown && kind === "replay") spent += limit;
      const maybe = unknown ? ` Up to ${number(limit)} more may have been ${does.answer}.` : "";
      if (!stop.signal.aborted) line.textContent = `After ${number(done)}: ${error.message}${maybe}`;
      return stop.signal.aborted;
    }
  };
  await dialog(
    does.heading,
    [
      el("p", {}, el("strong", {}, many), " fit the filter:"),
      el(
        "dl",
        { class: "facts" },
        ...worded(filters).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
      ),
      el("p", {}, does.says(count.timers === 1 ? "It" : "They")),
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
