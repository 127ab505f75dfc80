// The empty state: explains timers and creates a first one with one click.

import * as api from "./api.js";
import { button, el, say } from "./dom.js";

// The service itself receives the callback, so no other receiver has to run.
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
        ? `${error.message} This service can't call itself: create a timer with a URL of your own.`
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
      "A timer sends your JSON to your URL at the time that you choose. Try one:",
    ),
    el(
      "div",
      { class: "actions" },
      button("Create a timer that fires in 10 seconds", fire, { class: "main" }),
      el("a", { class: "button", href: "#/create" }, "Create your own timer"),
    ),
    el(
      "p",
      { class: "muted" },
      "This timer calls Duetime itself, so you need no receiver. Its page shows when it fires.",
    ),
  );
}
