// What a newcomer sees in place of nothing: what to do next, and a first timer in one click.

import * as api from "./api.js";
import { button, el, say } from "./dom.js";

// The service itself takes the callback: it is the one receiver that is surely there.
const HELLO = "/ui/hello";

async function fire(event) {
  event.target.disabled = true;
  try {
    const made = await api.post("/timers", {
      delay: "10s",
      callbackUrl: new URL(HELLO, location.origin).href,
      payload: { hello: "from your first timer" },
      correlationId: "first-steps",
      responseProtocol: "status",
      retryPolicy: { maxRetries: 0 },
    });
    location.hash = api.timerLink(made);
  } catch (error) {
    event.target.disabled = false;
    say(
      error.field === "callbackUrl"
        ? `${error.message}. This service calls public addresses only: make a timer of your own instead.`
        : error.message,
      "bad",
    );
  }
}

export function firstTimer() {
  return el(
    "section",
    { class: "card welcome", "aria-labelledby": "welcome" },
    el("h2", { id: "welcome" }, "No timers yet"),
    el(
      "p",
      {},
      "A timer is a promise: at its time, Duetime calls a URL of yours with the JSON you gave it. See one happen:",
    ),
    el(
      "div",
      { class: "actions" },
      button("Fire a first timer in 10 seconds", fire, { class: "main" }),
      el("a", { class: "button", href: "#/create" }, "Make one of your own"),
    ),
    el(
      "p",
      { class: "muted" },
      "The first one calls this service itself, so nothing else has to run. You will see it fire.",
    ),
  );
}
