// Puts the pages together: who is signed in, which page is shown, and what the keys do.

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
    place.replaceChildren(problem(new Error("There is no such page. The menu above has the ones there are."))),
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
  // Whoever listens to the page is told where they are, but not before they went anywhere.
  if (!first) (main.querySelector("h1") ?? main).focus({ preventScroll: true });
  if (!first) scrollTo(0, 0);
  first = false;
}

async function look() {
  try {
    session = await api.session.look();
  } catch (error) {
    main.replaceChildren(problem(error, look));
    return;
  }
  if (session.signedIn || !session.needed) live.start();
  else live.stop();
  await show();
}

addEventListener("hashchange", () => {
  // The skip link goes to #main: that is a place on this page, and no page.
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
    main.replaceChildren(problem(error, look)); // Still signed in: the cookie is good until the service says otherwise.
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
