// The timeline of a timer: what happened when, and why it fired late.

import { durationMs, now, precise, relative, span } from "./time.js";

const at = (text) => Date.parse(text);
const LATE_MS = 1_000;

// Attempts by firing, oldest first.
function firings(attempts) {
  const found = [];
  for (const attempt of attempts) {
    const last = found.at(-1);
    const same =
      last && (attempt.deliveryId ? last[0].deliveryId === attempt.deliveryId : attempt.attempt > last.at(-1).attempt);
    if (same) last.push(attempt);
    else found.push([attempt]);
  }
  return found;
}

// When the first attempt of the latest firing was due, and whether the firing was a replay.
function dueOf(timer, all) {
  const latest = all.at(-1);
  const before = all.at(-2)?.at(-1);
  const replayed = Boolean(before) && at(timer.executeAt) <= at(before.sentAt);
  if (!replayed) return { due: at(timer.executeAt), replayed };
  return { due: latest.length === 1 ? at(timer.fireAt) : null, replayed };
}

function outcomeOf({ outcome, status, error }) {
  if (outcome === "answered") return error ?? (status ? `HTTP ${status}` : "accepted");
  return `${outcome.replace("_", " ")}${error ? `: ${error}` : ""}`;
}

// How late the latest firing was, and why.
export function lateness(timer, attempts) {
  const all = firings(attempts);
  const latest = all.at(-1);
  if (!latest || (timer.status === "pending" && !timer.attempts)) return null;
  const { due, replayed } = dueOf(timer, all);
  const [firstTry] = latest;
  if (firstTry.attempt !== 1 || due === null) return null;
  const late = Math.max(0, at(firstTry.sentAt) - due);
  const after = `after it was ${replayed ? "replayed" : "due"}`;
  if (late < LATE_MS) return `Fired ${span(late)} ${after}.`;
  const deferred = !replayed && latest.length === 1 && at(timer.fireAt) > due;
  const reason = deferred
    ? "its destination was at its concurrency limit or kept failing, so the attempt was deferred"
    : at(timer.createdAt) > due
      ? "it was created after its due time"
      : "the service was stopped or overloaded, or the namespace was paused";
  return `Fired ${span(late)} late: attempt 1 started at ${precise(firstTry.sentAt)}. Reason: ${reason}.`;
}

// The steps of the timeline: [{ at, what, detail?, kind }].
export function story(timer, attempts) {
  const steps = [{ at: timer.createdAt, what: "Created", kind: "note" }];
  const all = firings(attempts);
  const missing = all.length ? all[0][0].attempt - 1 : 0;
  if (missing > 0)
    steps.push({
      at: null,
      what: `${missing} earlier ${missing === 1 ? "attempt is" : "attempts are"} no longer stored`,
      kind: "note",
    });
  all.forEach((firing, n) => {
    const latest = n === all.length - 1;
    const { due, replayed } = latest ? dueOf(timer, all) : {};
    if (latest && !replayed && timer.attempts) steps.push({ at: timer.executeAt, what: "Due", kind: "note" });
    if (latest && replayed) steps.push({ at: due === null ? null : timer.fireAt, what: "Replayed", kind: "note" });
    firing.forEach((attempt, i) => {
      const took = durationMs(attempt.duration) ?? 0;
      const ok = attempt.outcome === "answered" && !attempt.error;
      steps.push({
        at: attempt.sentAt,
        what: `Attempt ${attempt.attempt}`,
        detail: `${outcomeOf(attempt)} · took ${span(took)}`,
        answer: attempt.answer,
        deliveryId: attempt.deliveryId,
        kind: ok ? "good" : "bad",
      });
      if (ok && i === firing.length - 1 && !latest)
        steps.push({
          at: null,
          what: "Rescheduled",
          detail: "by the response, an update or a replay: a new firing with a new delivery id",
          kind: "note",
        });
    });
  });
  const ended = at(timer.executedAt ?? timer.updatedAt);
  if (timer.status === "pending") {
    const retry = timer.attempts > 0;
    const rescheduled = !retry && all.length > 0;
    const late = at(timer.fireAt) < now();
    const what = retry ? `Attempt ${timer.attempts + 1} is due` : rescheduled ? "Due again" : "Due";
    steps.push({ at: timer.fireAt, what, detail: relative(timer.fireAt), kind: late ? "warn" : "next", live: true });
  }
  if (timer.status === "executing")
    steps.push({ at: timer.updatedAt, what: `Attempt ${timer.attempts} in progress`, kind: "next" });
  if (timer.status === "completed")
    steps.push({ at: timer.executedAt, what: "Completed", detail: lateness(timer, attempts), kind: "good" });
  if (timer.status === "failed") {
    steps.push({
      at: timer.executedAt,
      what: "Failed",
      detail: `${timer.attempts > timer.retryPolicy.maxRetries ? "No retries left" : "Not retried"}. ${lateness(timer, attempts) ?? ""}`,
      kind: "bad",
    });
  }
  if (timer.status === "canceled") steps.push({ at: new Date(ended).toISOString(), what: "Canceled", kind: "note" });
  return steps;
}

// The state of the timer in one sentence.
export function standing(timer, attempts) {
  const late = lateness(timer, attempts) ?? "";
  switch (timer.status) {
    case "pending":
      if (timer.attempts)
        return `Attempt ${timer.attempts} failed (${timer.lastError ?? "no error stored"}); the next one is due ${relative(timer.fireAt)}.`;
      return at(timer.fireAt) < now() - LATE_MS
        ? `Was due ${relative(timer.fireAt)} and has not fired yet.`
        : `Due ${relative(timer.fireAt)}.`;
    case "executing":
      return `Attempt ${timer.attempts} is in progress. ${late}`;
    case "completed":
      return late || "Completed.";
    case "failed":
      return `Failed: ${timer.lastError ?? "no error stored"}. ${late}`;
    default:
      return "Canceled. It will not fire unless you replay it.";
  }
}
