// The list of timers: filters in the URL, pages by cursor, live rows, export and bulk actions.

import { lists } from "./abilities.js";
import * as api from "./api.js";
import { bulk } from "./bulk.js";
import { namespaceNames } from "./definition.js";
import { badge, button, counted, el, meaning, murmur, plural, put, title } from "./dom.js";
import { exportButtons } from "./export.js";
import { choice, text } from "./fields.js";
import { firstTimer } from "./first.js";
import { onChange } from "./live.js";
import { keep } from "./router.js";
import { about, local, utc } from "./time.js";

const STATUSES = ["pending", "executing", "completed", "failed", "canceled"];
const PAGE = 50;

const target = (timer) => timer.callbackSubject ?? timer.callbackUrl ?? "";

// A time from the URL in the form that the input needs, in local time.
const typed = (iso) => (iso && !Number.isNaN(Date.parse(iso)) ? local(iso).replace(" ", "T") : "");

export async function show(main, { query }, signal) {
  const names = await namespaceNames(signal);
  const statuses = [["", "any"], ...STATUSES.map((status) => [status])].filter(([status]) => lists({ status }));
  const all = {
    id: text({ value: query.id ?? "", placeholder: "exact", "data-filter": true }),
    status: choice(statuses, query.status ?? ""),
    namespace: choice([["", "all"], ...names.map((name) => [name])], query.namespace ?? ""),
    correlationId: text({ value: query.correlationId ?? "", placeholder: "exact" }),
    executeAfter: el("input", { type: "datetime-local", step: "1", value: typed(query.executeAfter) }),
    executeBefore: el("input", { type: "datetime-local", step: "1", value: typed(query.executeBefore) }),
  };
  const offered = ([name]) =>
    name === "namespace" || (name === "status" ? statuses.length > 0 : lists({ [name]: "given" }));
  const inputs = Object.fromEntries(Object.entries(all).filter(offered));
  const LABELS = {
    id: "Id",
    status: "Status",
    namespace: "Namespace",
    correlationId: "Correlation id",
    executeAfter: "Scheduled at or after",
    executeBefore: "Scheduled before",
  };
  const filters = () =>
    Object.fromEntries(
      Object.entries(inputs)
        .map(([name, input]) => [
          name,
          input.type === "datetime-local" && input.value ? utc(input.value) : input.value.trim(),
        ])
        .filter(([, value]) => value),
    );

  const body = el("tbody");
  const count = el("p", { class: "count", role: "status" });
  const nothing = el("div");
  const previous = button("Previous", () => turn(-1));
  const next = button("Next", () => turn(1));
  const place = el("span", { class: "muted" });
  const table = el(
    "table",
    { class: "timers" },
    el("caption", { class: "unseen" }, "Timers that match the filter"),
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        ...[
          ["Status", ""],
          ["Timer", ""],
          ["Due", ""],
          ["Attempts", "right wide-only"],
          ["Last error", "wide-only"],
        ].map(([label, kind]) => el("th", { scope: "col", class: kind || null }, label)),
      ),
    ),
    body,
  );
  const cancelAll = button(
    "Cancel all …",
    async () => (await bulk("cancel", { ...filters(), status: "pending" })) && act(true),
  );
  const replayAll = button(
    "Replay all …",
    async () => (await bulk("replay", { ...filters(), status: filters().status || "failed" })) && act(true),
  );
  const why = el("p", { class: "muted small", id: "bulk-why" });

  const rows = new Map();
  let cursors = [null];
  let follows = null;
  let asked = 0;

  function draw(page, quietly) {
    let changed = 0;
    const shown = page.timers.map((timer) => {
      const key = `${timer.namespace}/${timer.id}`;
      const old = rows.get(key);
      const state = `${timer.status} ${timer.updatedAt} ${timer.attempts}`;
      if (old?.state === state) return [key, old];
      const row = old?.row ?? el("tr");
      row.replaceChildren(...cells(timer));
      if (quietly) {
        changed += 1;
        row.classList.remove("changed");
        requestAnimationFrame(() => row.classList.add("changed"));
      }
      return [key, { row, state }];
    });
    const focused = document.activeElement;
    const link = focused?.closest?.("tbody") === body ? focused.getAttribute("href") : null;
    rows.clear();
    for (const [key, one] of shown) rows.set(key, one);
    const wanted = shown.map(([, one]) => one.row);
    put(body, wanted);
    if (link)
      [...body.querySelectorAll("a")].find((one) => one.getAttribute("href") === link)?.focus({ preventScroll: true });
    follows = page.nextCursor;
    previous.disabled = cursors.length === 1;
    next.disabled = !follows;
    place.textContent = `Page ${cursors.length}`;
    table.hidden = !wanted.length;
    nothing.replaceChildren(...(wanted.length ? [] : [none(Object.keys(filters()).length > 0)]));
    if (changed) murmur(`${plural(changed, "row")} changed.`);
  }

  const none = (filtered) =>
    filtered
      ? el("div", { class: "card empty" }, el("p", {}, "No timers match this filter."), button("Clear filter", clear))
      : firstTimer();

  // Responses may arrive out of order: only those to the latest request are shown.
  async function refresh(quietly = true) {
    asked += 1;
    const mine = asked;
    const latest = () => mine === asked;
    try {
      const page = await api.get(`/timers?${api.query({ ...filters(), limit: PAGE, cursor: cursors.at(-1) })}`, signal);
      if (latest()) draw(page, quietly);
      const found = latest() && (await api.get(`/timers/count?${api.query(filters())}`, signal));
      if (!found || !latest()) return;
      const text = `${counted(found)} ${found.timers === 1 && !found.more ? "timer" : "timers"}`;
      if (count.textContent !== text) count.textContent = text;
      count.title = meaning(found) ?? "";
    } catch (error) {
      if (latest()) throw error;
    }
  }

  // An error after a user's action is shown in place of the rows.
  async function act(quietly) {
    try {
      await refresh(quietly);
    } catch (error) {
      if (signal.aborted || error.status === 401) return;
      body.replaceChildren();
      rows.clear();
      table.hidden = true;
      count.textContent = "";
      nothing.replaceChildren(el("div", { class: "card problem", role: "alert" }, el("p", {}, error.message)));
    }
  }

  async function turn(by) {
    if (by > 0) cursors.push(follows);
    else cursors.pop();
    await act(false);
    table.scrollIntoView({ block: "nearest" });
  }

  function offer() {
    const { id, status } = filters();
    cancelAll.hidden = !lists({ ...filters(), status: "pending" });
    replayAll.hidden = !lists({ ...filters(), status: status || "failed" });
    cancelAll.disabled = Boolean(id) || (Boolean(status) && status !== "pending");
    replayAll.disabled = Boolean(id) || status === "pending" || status === "executing";
    why.hidden = cancelAll.hidden && replayAll.hidden;
    why.textContent = id
      ? "Open a timer to cancel or replay it."
      : `“Cancel all” applies to pending timers, “Replay all” to finished ones${status ? "" : " (failed ones unless you pick a status)"}.`;
  }

  async function filtered() {
    keep(api.query(filters()));
    cursors = [null];
    rows.clear();
    offer();
    await act(false);
  }

  function clear() {
    for (const input of Object.values(inputs)) {
      if (input.type === "select-one") input.selectedIndex = 0;
      else input.value = "";
    }
    filtered();
  }

  let soon = null;
  const changed = (event) => {
    clearTimeout(soon);
    soon = setTimeout(filtered, event.type === "input" && event.target.type !== "select-one" ? 300 : 0);
  };
  const form = el(
    "form",
    {
      role: "search",
      "aria-label": "Filter timers",
      input: changed,
      submit: (event) => {
        event.preventDefault();
        filtered();
      },
    },
    ...Object.entries(inputs).map(([name, input]) => {
      input.id = `filter-${name}`;
      return el("div", { class: "field" }, el("label", { for: input.id }, LABELS[name]), input);
    }),
    el("div", { class: "field end" }, button("Clear", clear)),
  );
  // On a small screen the filter is folded, so that the list comes first.
  const wide = matchMedia("(min-width: 621px)");
  const folded = el("details", { class: "card filters" }, el("summary", {}, "Filter"), form);
  const unfold = () => {
    folded.open = folded.open || wide.matches || Object.keys(filters()).length > 0;
  };
  unfold();
  wide.addEventListener("change", unfold, { signal });
  main.replaceChildren(
    el(
      "div",
      { class: "heading" },
      title("Timers"),
      count,
      el("div", { class: "actions" }, cancelAll, replayAll, ...exportButtons(filters)),
    ),
    folded,
    why,
    el("div", { class: "card list" }, table, nothing, el("div", { class: "pager" }, previous, place, next)),
  );
  cancelAll.setAttribute("aria-describedby", "bulk-why");
  replayAll.setAttribute("aria-describedby", "bulk-why");
  offer();
  await act(false);
  onChange(() => refresh(), signal);
  const ticking = setInterval(() => {
    for (const shown of body.querySelectorAll("[data-at]")) shown.textContent = about(shown.dataset.at);
  }, 1_000);
  signal.addEventListener("abort", () => clearInterval(ticking));
}

function cells(timer) {
  return [
    el("td", {}, badge(timer.status)),
    el(
      "th",
      { scope: "row" },
      el("a", { href: api.timerLink(timer) }, timer.id),
      el(
        "span",
        { class: "muted block" },
        [timer.namespace, target(timer), timer.correlationId].filter(Boolean).join(" · "),
      ),
    ),
    el(
      "td",
      { class: "when" },
      el("time", { datetime: timer.fireAt }, local(timer.fireAt)),
      el("span", { class: "muted block", "data-at": timer.fireAt }, about(timer.fireAt)),
    ),
    el("td", { class: "right wide-only" }, String(timer.attempts)),
    el("td", { class: "break wide-only" }, timer.lastError ?? ""),
  ];
}
