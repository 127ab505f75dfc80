// One timer, live: its state, timeline, fields, payload and actions.

import { lists } from "./abilities.js";
import * as api from "./api.js";
import { curlOf } from "./curl.js";
import { COMPLETED_BY, definitionForm } from "./definition.js";
import { badge, become, button, copy, dialog, el, put, say, section, title } from "./dom.js";
import { follows, onChange } from "./live.js";
import { standing, story } from "./story.js";
import { local, now, offsetAt, precise, relative, utc, zone } from "./time.js";

const pretty = (value) => JSON.stringify(value, null, 2);

export async function show(main, { path }, signal) {
  const [, namespace, id] = path;
  const where = api.timerPath(namespace, id);
  const both = () => Promise.all([api.timer(where, signal), api.get(`${where}/attempts`, signal)]);

  const state = el("div", { class: "verdict card" });
  const actions = el("div", { class: "actions" });
  const line = el("ol", { class: "timeline" });
  const facts = el("dl", { class: "facts" });
  const data = el("div");
  let timer;
  let attempts;
  let drawn = "";
  let asked = 0;
  let shown = 0;

  let busy = false;
  // The button stays enabled, so that the focus returns to it when the dialog closes.
  const act = (text, run, attributes) =>
    button(
      text,
      async () => {
        if (busy) return;
        busy = true;
        try {
          await run();
        } catch (error) {
          say(error.message, "bad");
        }
        busy = false;
        await refresh().catch(gone);
      },
      attributes,
    );
  const BUTTONS = {
    edit: act("Edit", edit),
    cancel: act("Cancel", cancel),
    replay: act("Replay", async () => {
      await api.post(`${where}/replay`);
      say("Timer replayed: it fires again now.");
    }),
    curl: button("Copy as curl", () => copy(curlOf(timer), "the curl command")),
    remove: act("Delete", remove, { class: "danger" }),
  };

  // A response that arrives after the one to a later request is stale.
  async function refresh() {
    asked += 1;
    const mine = asked;
    const answers = await both();
    if (mine < shown) return;
    shown = mine;
    [timer, { attempts }] = answers;
    const fresh = JSON.stringify([timer, attempts]);
    if (fresh !== drawn) draw();
    else tick();
    drawn = fresh;
  }

  // A failed refresh is tried again; only a 404 is shown.
  function gone(error) {
    if (error.status === 404 && !signal.aborted)
      state.replaceChildren(el("p", {}, "This timer no longer exists: it was deleted, or its retention ended."));
  }

  function tick() {
    const text = standing(timer, attempts);
    const shown = state.querySelector("p.says");
    if (shown && shown.textContent !== text) shown.textContent = text;
    for (const one of line.querySelectorAll("[data-at]")) one.textContent = relative(one.dataset.at);
  }

  function draw() {
    const { status } = timer;
    const before = state.querySelector(".badge")?.className;
    const focused = document.activeElement;
    const acting = actions.contains(focused);
    state.replaceChildren(badge(status), el("p", { class: "says" }, standing(timer, attempts)));
    if (before && before !== state.querySelector(".badge").className)
      say(`The timer is ${status}. ${standing(timer, attempts)}`);
    const final = !["pending", "executing"].includes(status);
    const offered = [
      status === "pending" && "edit",
      status === "pending" && "cancel",
      final && "replay",
      "curl",
      status !== "executing" && "remove",
    ].filter(Boolean);
    put(actions, offered.map((name) => BUTTONS[name]));
    if (acting) (actions.contains(focused) ? focused : actions.firstElementChild).focus();
    line.replaceChildren(...story(timer, attempts).map(step));
    const fields = el(
      "dl",
      { class: "facts" },
      ...[
        ["Id", timer.id],
        ["Namespace", el("a", { href: `#/namespaces/${encodeURIComponent(timer.namespace)}` }, timer.namespace)],
        ["Scheduled for", time(timer.executeAt)],
        timer.fireAt !== timer.executeAt && [timer.status === "pending" ? "Next attempt due" : "Last attempt due", time(timer.fireAt)],
        timer.callbackSubject
          ? ["NATS subject", timer.callbackSubject]
          : ["Callback", `${timer.callbackMethod} ${timer.callbackUrl}`],
        timer.correlationId && [
          "Correlation id",
          lists({ correlationId: timer.correlationId })
            ? el("a", { href: `#/timers?${api.query({ correlationId: timer.correlationId })}` }, timer.correlationId)
            : timer.correlationId,
        ],
        ["Completed by", COMPLETED_BY[timer.responseProtocol]],
        ["Timeout per attempt", timer.callbackTimeout],
        ["Retries", retries(timer.retryPolicy)],
        timer.lastError && ["Last error", timer.lastError],
        ["Updated", time(timer.updatedAt)],
      ]
        .filter(Boolean)
        .flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    );
    become(facts, fields);
    const headers = Object.entries(timer.callbackHeaders);
    data.replaceChildren(
      ...[
        block("Payload", timer.payload === null ? null : pretty(timer.payload), "No payload."),
        timer.metadata !== null && block("Metadata", pretty(timer.metadata)),
        headers.length > 0 && block("Headers", headers.map(([name, value]) => `${name}: ${value}`).join("\n")),
      ].filter(Boolean),
    );
  }

  async function edit() {
    const form = await definitionForm(timer);
    await dialog(
      "Edit timer",
      [
        el(
          "p",
          { class: "muted" },
          `Currently due ${local(timer.fireAt)} ${zone}. Saving starts a new firing, with all retries available.`,
        ),
        form.node,
      ],
      [["save", "Save"]],
      {
        wide: true,
        cancel: "Discard",
        act: async () => {
          const body = form.body();
          if (body === null) return false;
          try {
            await api.put(where, body);
            say("Saved.");
            return true;
          } catch (error) {
            if (!form.blame(error)) say(error.message, "bad");
            return false;
          }
        },
      },
    );
  }

  async function cancel() {
    const answer = await dialog(
      "Cancel this timer?",
      [
        el(
          "p",
          {},
          `It is due ${relative(timer.fireAt)} and will not fire then. It stays in the list, and you can replay it.`,
        ),
      ],
      [["yes", "Cancel timer", "danger"]],
      { cancel: "Keep timer" },
    );
    if (!answer) return;
    await api.post(`${where}/cancel`);
    say("Timer canceled.");
  }

  async function remove() {
    const answer = await dialog(
      "Delete this timer?",
      [el("p", {}, "This removes the timer and its history. It can't be undone.")],
      [["yes", "Delete timer", "danger"]],
      { cancel: "Keep timer" },
    );
    if (!answer) return;
    try {
      await api.remove(where);
    } catch (error) {
      if (error.status !== 404) throw error; // Already gone: an earlier attempt may have deleted it.
    }
    say("Timer deleted.");
    location.hash = "#/timers";
  }

  try {
    await refresh();
  } catch (error) {
    if (error.status !== 404) throw error;
    main.replaceChildren(
      title("Timer not found"),
      el(
        "div",
        { class: "card empty" },
        el("p", {}, `There is no timer ${id} in namespace ${namespace}. It may have been deleted, or its retention ended.`),
        el("a", { class: "button", href: "#/timers" }, "All timers"),
      ),
    );
    return;
  }
  main.replaceChildren(
    el(
      "nav",
      { class: "crumbs", "aria-label": "Breadcrumbs" },
      el("a", { href: "#/timers" }, "Timers"),
      " / ",
      el("a", { href: `#/timers?${api.query({ namespace })}` }, namespace),
    ),
    el("div", { class: "heading" }, title(id), actions),
    state,
    el("div", { class: "two uneven" }, section("Timeline", line), el("div", {}, section("Fields", facts), data)),
  );
  onChange(() => refresh().catch(gone), signal, 500);
  // Near the due time it polls each second, in case no event reports this timer.
  const ticking = setInterval(() => {
    tick();
    const near =
      timer.status === "executing" || (timer.status === "pending" && Date.parse(timer.fireAt) - now() < 1_000);
    if (near && follows()) refresh().catch(gone);
  }, 1_000);
  signal.addEventListener("abort", () => clearInterval(ticking));
}

function time(text) {
  return el("time", { datetime: text, title: utc(text) }, `${precise(text)} (${offsetAt(text)})`);
}

function step({ at, what, detail, answer, deliveryId, kind, live }) {
  return el(
    "li",
    { class: kind },
    el(
      "p",
      {},
      el("strong", {}, what),
      at && el("time", { class: "muted", datetime: at, title: utc(at) }, precise(at)),
    ),
    detail && el("p", { class: "break", "data-at": live ? at : null }, detail),
    answer && el("details", {}, el("summary", {}, "Response body (first 200 characters)"), el("pre", {}, answer)),
    deliveryId && kind === "bad" && el("p", { class: "muted small break" }, `delivery id ${deliveryId}`),
  );
}

function retries(policy) {
  if (!policy.maxRetries) return "none";
  const { maxRetries, initialInterval, backoffMultiplier, maxInterval, maxRetryAttemptsDuration } = policy;
  return [
    `up to ${maxRetries}, first after ${initialInterval}, backoff × ${backoffMultiplier} up to ${maxInterval}`,
    `for ${maxRetryAttemptsDuration}`,
    ...(policy.jitter ? ["with jitter"] : []),
    ...(policy.giveUpOn.length ? [`gives up on ${policy.giveUpOn.join(", ")}`] : []),
  ].join(", ");
}

function block(heading, text, empty) {
  return section(
    heading,
    text === null
      ? el("p", { class: "empty" }, empty)
      : el(
          "div",
          {},
          button("Copy", () => copy(text, heading.toLowerCase()), {
            class: "quiet corner",
            "aria-label": `Copy the ${heading.toLowerCase()}`,
          }),
          el("pre", { tabindex: "0", role: "region", "aria-label": `${heading}, as text` }, el("code", {}, text)),
        ),
  );
}
