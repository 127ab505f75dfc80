// Live updates: one event stream for the whole page, closed while the page is hidden or paused.

import * as api from "./api.js";
import { setNow } from "./time.js";

const listeners = new Set();
let source = null;
let paused = false;
let wanted = false;
let again = null;

const mark = (text, state) => {
  const shown = document.getElementById("live");
  shown.textContent = text;
  shown.dataset.state = state;
  shown.setAttribute("aria-label", `${text}: ${paused ? "resume" : "pause"} live updates`);
};

function open() {
  close();
  if (!wanted || paused || document.hidden) {
    if (paused) mark("Paused", "paused");
    return;
  }
  mark("Connecting", "waiting");
  source = api.events();
  source.addEventListener("open", () => mark("Live", "live"));
  source.addEventListener("pulse", (event) => {
    const pulse = JSON.parse(event.data);
    setNow(pulse.now);
    mark("Live", "live");
    for (const listener of listeners) listener(pulse);
  });
  source.addEventListener("error", () => {
    mark("Reconnecting", "waiting");
    // The browser reconnects unless the service rejected the request: the session may be over.
    if (source?.readyState !== EventSource.CLOSED) return;
    again = setTimeout(open, 3_000);
    api.session.look().then(
      ({ signedIn, needed }) => signedIn || !needed || document.dispatchEvent(new Event("signedout")),
      () => {},
    );
  });
}

function close() {
  clearTimeout(again);
  source?.close();
  source = null;
}

export function start() {
  wanted = true;
  document.getElementById("live").hidden = false;
  open();
}

export function stop() {
  wanted = false;
  document.getElementById("live").hidden = true;
  close();
}

// Whether live updates are on.
export const follows = () => !paused && !document.hidden;

export function onPulse(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => listeners.delete(listener));
}

// Calls `refresh` when timers changed, at the earliest `every` ms after the last call ended. The first event counts as a
// change: timers may have changed between the page's first request and this event.
export function onChange(refresh, signal, every = 1_000) {
  let seen = null;
  let busy = false;
  let stale = false;
  const run = async () => {
    if (busy) {
      stale = true;
      return;
    }
    busy = true;
    stale = false;
    try {
      await refresh();
    } catch {
      stale = !signal.aborted; // The next pulse tries again.
    }
    await new Promise((resolve) => setTimeout(resolve, every));
    busy = false;
    if (stale && !signal.aborted) run();
  };
  onPulse((pulse) => {
    if (pulse.changes !== seen) run();
    seen = pulse.changes;
  }, signal);
}

document.addEventListener("visibilitychange", open);
document.getElementById("live").addEventListener("click", () => {
  paused = !paused;
  open();
});
