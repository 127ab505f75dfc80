// The list: filters in the address, pages by cursor, rows that follow what happens, export, and acts on all of it.

import * as api from "./api.js";
import { bulk } from "./bulk.js";
import { namespaceNames } from "./definition.js";
import { badge, button, counted, el, murmur, plural, title } from "./dom.js";
import { exportButtons } from "./export.js";
import { choice, text } from "./fields.js";
import { firstTimer } from "./first.js";
import { onChange } from "./live.js";
import { keep } from "./router.js";
import { about, local, utc } from "./time.js";

const STATUSES = ["pending", "executing", "completed", "failed", "canceled"];
const PAGE = 50;

const target = (timer) => timer.callbackSubject ?? timer.callbackUrl ?? "";

// A time of the address as the input wants it, in local time.
const typed = (iso) => (iso && !Number.isNaN(Date.parse(iso)) ? local(iso).replace(" ", "T") : "");

export async function show(main, { query }, signal) {
  const names = await namespaceNames(signal);
  const inputs = {
    id: text({ value: query.id ?? "", placeholder: "exact", "data-filter": true }),
    status: choice([["", "any"], ...STATUSES.map((status) => [status])], query.status ?? ""),
    namespace: choice([["", "all"], ...names.map((name) => [name])], query.namespace ?? ""),
    correlationId: text({ value: query.correlationId ?? "", placeholder: "exact" }),
    executeAfter: el("input", { type: "datetime-local", step: "1", value: typed(query.executeAfter) }),
    executeBefore: el("input", { type: "datetime-local", step: "1", value: typed(query.executeBefore) }),
  };
  const LABELS = {
    id: "Id",
    status: "Status",
    namespace: "Namespace",
    correlationId: "Correlation id",
    executeAfter: "Due at or after",
    executeBefore: "Due before",
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
    el("caption", { class: "unseen" }, "Timers that fit the filter"),
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
    "Cancel these …",
    async () => (await bulk("cancel", { ...filters(), status: "pending" })) && act(true),
  );
  const replayAll = button(
    "Replay these …",
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
    // Rows that stay where they are keep the focus and the selection.
    if (wanted.length !== body.children.length || wanted.some((row, at) => row !== body.children[at]))
      body.replaceChildren(...wanted);
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
      ? el("div", { class: "card empty" }, el("p", {}, "No timer fits this filter."), button("Clear the filter", clear))
      : firstTimer();

  // Answers may come in another order than they were asked for: only those to the latest question are shown.
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
    } catch (error) {
      if (latest()) throw error;
    }
  }

  // Whatever a person does shows what went wrong where the rows would be.
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
    cancelAll.disabled = Boolean(id) || (Boolean(status) && status !== "pending");
    replayAll.disabled = Boolean(id) || status === "pending" || status === "executing";
    why.textContent = id
      ? "To act on one timer, open it."
      : `Cancel is for pending timers, replay for finished ones${status ? "" : ": without a status, for failed ones"}.`;
  }

  async function filtered() {
    keep(api.query(filters()));
    cursors = [null];
    rows.clear();
    offer();
    await act(false);
  }

  function clear() {
    for (const input of Object.values(inputs)) input.value = "";
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
      "aria-label": "Filter the timers",
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
  // On a small screen the list comes first, and the filter is a tap away.
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
      el("time", { datetime: timer.executeAt }, local(timer.executeAt)),
      el("span", { class: "muted block", "data-at": timer.executeAt }, about(timer.executeAt)),
    ),
    el("td", { class: "right wide-only" }, String(timer.attempts)),
    el("td", { class: "break wide-only" }, timer.lastError ?? ""),
  ];
}
