// Namespaces: what there is, and one of them with its retention, its weight, its pause and its signing secrets.

import * as api from "./api.js";
import { button, copy, dialog, el, plural, say, section, title } from "./dom.js";
import { allRight, blame, field, text } from "./fields.js";
import { fault, rulesOf } from "./rules.js";
import { local, relative } from "./time.js";

const at = (name) => `/namespaces/${encodeURIComponent(name)}`;
const share =
  "Its share when more is due than can be delivered, 1 to 100: weight 3 gets three times the share of weight 1.";
const kept = (retention) => retention ?? "as the settings say";
const state = (paused) =>
  el(
    "span",
    { class: `badge ${paused ? "executing" : "completed"}` },
    el("span", { "aria-hidden": "true" }, paused ? "‖" : "✓"),
    paused ? " paused" : " running",
  );

export async function show(main, { path }, signal) {
  if (path[1] !== undefined) await one(main, path[1], signal);
  else await all(main, signal);
}

async function all(main, signal) {
  const { namespaces } = await api.get("/namespaces", signal);
  const rows = namespaces.map((namespace) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", class: "break" }, el("a", { href: `#${at(namespace.name)}` }, namespace.name)),
      el("td", {}, state(namespace.paused)),
      el("td", {}, kept(namespace.retention)),
      el("td", { class: "right wide-only" }, String(namespace.weight)),
      el("td", { class: "right wide-only" }, String(namespace.shards)),
      el(
        "td",
        { class: "wide-only" },
        namespace.secrets.length ? plural(namespace.secrets.length, "secret") : "not signed",
      ),
      el("td", { class: "wide-only" }, local(namespace.createdAt)),
    ),
  );
  main.replaceChildren(
    el(
      "div",
      { class: "heading" },
      title("Namespaces"),
      el("div", { class: "actions" }, button("New namespace", make, { class: "main" })),
    ),
    el("p", { class: "muted" }, "A namespace is a scope of ids with its own retention, weight, pause and signing secrets."),
    el(
      "div",
      { class: "card list" },
      el(
        "table",
        {},
        el("caption", { class: "unseen" }, "Namespaces"),
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ...[
              ["Name"],
              ["State"],
              ["Finished timers kept"],
              ["Weight", "right wide-only"],
              ["Shards", "right wide-only"],
              ["Callbacks", "wide-only"],
              ["Made", "wide-only"],
            ].map(([label, kind]) => el("th", { scope: "col", class: kind }, label)),
          ),
        ),
        el("tbody", {}, ...rows),
      ),
    ),
  );
}

async function make() {
  const rules = await rulesOf("NamespaceIn");
  const check = (name) => (value) => fault(value, rules.of(name));
  const name = field("Name", text({ placeholder: "billing" }), {
    name: "name",
    required: true,
    hint: "Letters, digits, dots, hyphens and underscores.",
    check: check("name"),
  });
  const retention = field("Retention", text({ placeholder: "as the settings say" }), {
    name: "retention",
    hint: "How long finished timers are kept: like 30d, or forever.",
    check: check("retention"),
  });
  const shards = field("Shards", text({ inputmode: "numeric", placeholder: "all" }), {
    name: "shards",
    hint: "How many shards it is spread over. Fixed once it is made.",
    check: check("shards"),
  });
  const weight = field("Weight", text({ inputmode: "numeric", placeholder: "1" }), {
    name: "weight",
    hint: share,
    check: check("weight"),
  });
  const fields = [name, retention, shards, weight];
  await dialog(
    "New namespace",
    fields.map((one) => one.node),
    [["make", "Create"]],
    {
      cancel: "Discard",
      act: async () => {
        if (!allRight(fields)) return false;
        const asked = { name: name.value.trim() };
        if (retention.value.trim()) asked.retention = retention.value.trim();
        if (shards.value.trim()) asked.shards = Number(shards.value);
        if (weight.value.trim()) asked.weight = Number(weight.value);
        try {
          await api.post("/namespaces", asked);
          location.hash = `#${at(asked.name)}`;
          return true;
        } catch (error) {
          if (!blame(fields, error)) say(error.message, "bad");
          return false;
        }
      },
    },
  );
}

async function one(main, name, signal) {
  const rules = await rulesOf("NamespaceChanges");
  const status = el("div", { class: "verdict card" });
  const actions = el("div", { class: "actions" });
  const facts = el("dl", { class: "facts" });
  const secrets = el("div");
  const retention = field("Retention", text(), {
    name: "retention",
    required: true,
    hint: "How long finished timers are kept: like 30d, at least 1s, or forever.",
    check: (value) => fault(value, rules.of("retention")),
  });
  const weight = field("Weight", text({ inputmode: "numeric" }), {
    name: "weight",
    required: true,
    hint: share,
    check: (value) => fault(value, rules.of("weight")),
  });

  const change = async (asked, said) => {
    try {
      draw(await api.patch(at(name), asked));
      say(said);
    } catch (error) {
      if (!blame([retention, weight], error)) say(error.message, "bad");
    }
  };
  function draw(namespace) {
    const { paused } = namespace;
    status.replaceChildren(
      state(paused),
      el(
        "p",
        {},
        paused
          ? "Nothing of it fires. New timers are taken, and those that fall due wait."
          : "Its timers fire when they are due.",
      ),
    );
    actions.replaceChildren(
      button(paused ? "Resume" : "Pause", () =>
        change(
          { paused: !paused },
          paused ? "Resumed: what is due fires now." : "Paused: nothing of it fires until it is resumed.",
        ),
      ),
      el("a", { class: "button", href: `#/timers?${api.query({ namespace: name })}` }, "Its timers"),
      el("a", { class: "button", href: `#/create?${api.query({ namespace: name })}` }, "New timer in it"),
    );
    const listed = [
      ["Shards", `${namespace.shards}, fixed`],
      ["Finished timers kept", kept(namespace.retention)],
      ["Weight", String(namespace.weight)],
      ["Made", local(namespace.createdAt)],
    ];
    facts.replaceChildren(...listed.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]));
    secrets.replaceChildren(shownSecrets(namespace));
  }
  function shownSecrets(namespace) {
    if (!namespace.secrets.length) {
      return el(
        "p",
        { class: "empty" },
        "Callbacks are not signed. Make a secret, and receivers can check that a callback is yours.",
      );
    }
    const rows = namespace.secrets.map((secret) =>
      el(
        "tr",
        {},
        el("th", { scope: "row", class: "break" }, secret.id),
        el("td", {}, local(secret.createdAt)),
        el(
          "td",
          {},
          secret.expiresAt ? `signs too, until ${local(secret.expiresAt)} (${relative(secret.expiresAt)})` : "signs",
        ),
        el(
          "td",
          { class: "right" },
          button("Delete", () => drop(secret.id), { "aria-label": `Delete secret ${secret.id}` }),
        ),
      ),
    );
    return el(
      "div",
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "The secrets there are" },
      el(
        "table",
        {},
        el("caption", { class: "unseen" }, "Signing secrets, newest first"),
        el(
          "thead",
          {},
          el("tr", {}, ...["Id", "Made", "State", "Action"].map((label) => el("th", { scope: "col" }, label))),
        ),
        el("tbody", {}, ...rows),
      ),
    );
  }
  const saving = (one, label, asked) =>
    el(
      "form",
      {
        novalidate: true,
        submit: (event) => {
          event.preventDefault();
          if (allRight([one])) change(asked(), "Saved.");
        },
      },
      one.node,
      el("button", {}, label),
    );
  const again = async () => draw(await api.get(at(name), signal));
  async function add() {
    let made;
    try {
      made = await api.post(`${at(name)}/secrets`);
    } catch (error) {
      say(error.message, "bad");
      return;
    }
    await again();
    await dialog("A new signing secret", [
      el(
        "p",
        {},
        el("strong", {}, "It is shown this once."),
        " Give it to the receivers now. The one before it signs too for 24 hours.",
      ),
      el("pre", { tabindex: "0", role: "region", "aria-label": "The secret" }, el("code", {}, made.secret)),
      button("Copy the secret", () => copy(made.secret, "the secret"), { class: "main" }),
    ]);
  }
  async function drop(id) {
    const answer = await dialog(
      "Delete this secret?",
      [el("p", {}, "Callbacks are no longer signed with it. Receivers that know only this one will refuse them.")],
      [["yes", "Delete it", "danger"]],
      { cancel: "Keep it" },
    );
    if (!answer) return;
    try {
      await api.remove(`${at(name)}/secrets/${encodeURIComponent(id)}`);
      say("Deleted.");
    } catch (error) {
      say(error.message, "bad");
    }
    await again();
  }

  let namespace;
  try {
    namespace = await api.get(at(name), signal);
  } catch (error) {
    if (error.status !== 404) throw error;
    main.replaceChildren(
      title("No such namespace"),
      el(
        "div",
        { class: "card empty" },
        el("p", {}, `There is no namespace ${name}.`),
        el("a", { class: "button", href: "#/namespaces" }, "All namespaces"),
      ),
    );
    return;
  }
  draw(namespace);
  retention.input.value = namespace.retention ?? "";
  weight.input.value = String(namespace.weight);
  main.replaceChildren(
    el("nav", { class: "crumbs", "aria-label": "Where this is" }, el("a", { href: "#/namespaces" }, "Namespaces")),
    el("div", { class: "heading" }, title(name), actions),
    status,
    el(
      "div",
      { class: "two" },
      section(
        "Settings",
        facts,
        saving(retention, "Save the retention", () => ({ retention: retention.value.trim() })),
        saving(weight, "Save the weight", () => ({ weight: Number(weight.value) })),
      ),
      section("Signing secrets", secrets, button("New secret", add)),
    ),
  );
}
