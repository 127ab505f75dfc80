// Connects the pages: tracks the session, shows the page of the current route, and handles shortcut keys.

import { learn } from "./abilities.js";
import * as api from "./api.js";
import * as create from "./create.js";
import { problem } from "./dom.js";
import * as live from "./live.js";
import * as namespaces from "./namespaces.js";
import * as overview from "./overview.js";
import { route } from "./router.js";
import * as signin from "./signin.js";
import * as timer from "./timer.js";
import * as timers from "./timers.js";

const main = document.getElementById("main");
const nav = document.getElementById("nav");
const signout = document.getElementById("signout");
let leaving = new AbortController();
let session = { signedIn: false, needed: true };
let first = true;

const notFound = {
  show: (place) =>
    place.replaceChildren(problem(new Error("There is no page at this address."), null, "Page not found")),
};

function pageOf(path) {
  const [name, ...rest] = path;
  if (!name) return [overview, "Overview"];
  if (name === "timers")
    return rest.length === 2 ? [timer, rest[1]] : rest.length ? [notFound, "Not found"] : [timers, "Timers"];
  if (name === "create" && !rest.length) return [create, "New timer"];
  if (name === "namespaces") return rest.length > 1 ? [notFound, "Not found"] : [namespaces, rest[0] ?? "Namespaces"];
  return [notFound, "Not found"];
}

async function show() {
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const signedIn = session.signedIn || !session.needed;
  const asked = route();
  const [page, name] = signedIn ? pageOf(asked.path) : [signin, "Sign in"];
  document.title = `${name} · Duetime`;
  nav.hidden = !signedIn;
  signout.hidden = !signedIn || !session.needed;
  for (const link of nav.querySelectorAll("a")) {
    const here = link.getAttribute("href").replace(/^#\/?/, "") === (asked.path[0] ?? "");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  main.setAttribute("aria-busy", "true");
  try {
    await page.show(main, asked, signal);
  } catch (error) {
    if (signal.aborted || error.status === 401) return;
    main.replaceChildren(problem(error, show));
  } finally {
    if (!signal.aborted) main.removeAttribute("aria-busy");
  }
  if (signal.aborted) return;
  // Moves the focus to the new page's heading, so that a screen reader announces it; not on the first load.
  if (!first) (main.querySelector("h1") ?? main).focus({ preventScroll: true });
  if (!first) scrollTo(0, 0);
  first = false;
}

async function look() {
  try {
    session = await api.session.look();
    learn(session.abilities);
  } catch (error) {
    main.replaceChildren(problem(error, look));
    return;
  }
  if (session.signedIn || !session.needed) live.start();
  else live.stop();
  await show();
}

addEventListener("hashchange", () => {
  // The skip link goes to #main, which is an element of this page and not a route.
  if (location.hash === "#main") {
    history.replaceState(null, "", location.pathname);
    main.focus();
  } else show();
});
document.addEventListener("signedin", look);
document.addEventListener("signedout", () => {
  if (!session.signedIn) return;
  session.signedIn = false;
  live.stop();
  show();
});
signout.addEventListener("click", async () => {
  try {
    await api.session.end();
  } catch (error) {
    main.replaceChildren(problem(error, look)); // Still signed in: the cookie is valid until the service ends the session.
    return;
  }
  await look();
});
addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("input, textarea, select, dialog");
  if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const filter = main.querySelector("[data-filter]");
  if (!filter) return;
  event.preventDefault();
  filter.closest("details").open = true;
  filter.focus();
});

look();
