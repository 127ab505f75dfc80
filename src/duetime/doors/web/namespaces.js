// The list of namespaces, and one namespace with its retention, weight, pause and signing secrets.

import * as api from "./api.js";
import { button, copy, dialog, el, say, section, title } from "./dom.js";
import { allRight, blame, field, text } from "./fields.js";
import { fault, rulesOf } from "./rules.js";
import { local, relative } from "./time.js";

const at = (name) => `/namespaces/${encodeURIComponent(name)}`;
const share =
  "1 to 100. When more timers are due than can be delivered, weight 3 gets three times the share of weight 1.";
const KEPT = "Must be a duration of at least 1s, such as 30d, or forever.";
const RETENTION = "How long finished timers are kept: a duration of at least 1s, such as 30d, or forever.";
const kept = (retention) => retention ?? "default";
const state = (paused) =>
  el(
    "span",
    { class: `badge ${paused ? "executing" : "completed"}` },
    el("span", { "aria-hidden": "true" }, paused ? "‖" : "✓"),
    paused ? " paused" : " active",
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
        namespace.secrets.length ? "signed" : "not signed",
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
    el("p", { class: "muted" }, "Each namespace has its own timer ids, retention, weight and signing secrets, and can be paused."),
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
              ["Retention"],
              ["Weight", "right wide-only"],
              ["Shards", "right wide-only"],
              ["Callbacks", "wide-only"],
              ["Created", "wide-only"],
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
  const check = (name, expected) => (value) => fault(value, rules.of(name), expected);
  const name = field("Name", text({ placeholder: "billing" }), {
    name: "name",
    required: true,
    hint: "Letters, digits, dots, hyphens and underscores.",
    check: check("name", "Must have only the letters a–z and A–Z, digits, dots, hyphens and underscores."),
  });
  const retention = field("Retention", text({ placeholder: "default of the service" }), {
    name: "retention",
    hint: RETENTION,
    check: check("retention", KEPT),
  });
  const shards = field("Shards", text({ inputmode: "numeric", placeholder: "all" }), {
    name: "shards",
    hint: "How many shards its timers are spread over. You can't change this later.",
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
    hint: RETENTION,
    check: (value) => fault(value, rules.of("retention"), KEPT),
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
          ? "No timer of this namespace fires. New timers are accepted, and due timers wait."
          : "Timers fire when they are due.",
      ),
    );
    actions.replaceChildren(
      button(paused ? "Resume" : "Pause", () =>
        change(
          { paused: !paused },
          paused ? "Resumed. Due timers fire now." : "Paused. No timer fires until you resume the namespace.",
        ),
      ),
      el("a", { class: "button", href: `#/timers?${api.query({ namespace: name })}` }, "View timers"),
      el("a", { class: "button", href: `#/create?${api.query({ namespace: name })}` }, "New timer here"),
    );
    const listed = [
      ["Shards", `${namespace.shards} (fixed)`],
      ["Retention", kept(namespace.retention)],
      ["Weight", String(namespace.weight)],
      ["Created", local(namespace.createdAt)],
    ];
    facts.replaceChildren(...listed.flatMap(([key, value]) => [el("dt", {}, key), el("dd", {}, value)]));
    secrets.replaceChildren(shownSecrets(namespace));
  }
  function shownSecrets(namespace) {
    if (!namespace.secrets.length) {
      return el(
        "p",
        { class: "empty" },
        "Callbacks are not signed. Create a secret so that receivers can verify them.",
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
          secret.expiresAt ? `signs callbacks until ${local(secret.expiresAt)} (${relative(secret.expiresAt)})` : "signs callbacks",
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
      { class: "scroll", tabindex: "0", role: "region", "aria-label": "Signing secrets, as a table" },
      el(
        "table",
        {},
        el("caption", { class: "unseen" }, "Signing secrets, newest first"),
        el(
          "thead",
          {},
          el("tr", {}, ...["Id", "Created", "State", "Action"].map((label) => el("th", { scope: "col" }, label))),
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
    await dialog("New signing secret", [
      el(
        "p",
        {},
        el("strong", {}, "Duetime shows this secret only once."),
        " Copy it to your receivers now. The previous secret, if any, also signs for another 24 hours.",
      ),
      el("pre", { tabindex: "0", role: "region", "aria-label": "The secret" }, el("code", {}, made.secret)),
      button("Copy secret", () => copy(made.secret, "the secret"), { class: "main" }),
    ]);
  }
  async function drop(id) {
    const answer = await dialog(
      "Delete this secret?",
      [el("p", {}, "Callbacks will no longer be signed with it. Receivers that know only this secret will reject them.")],
      [["yes", "Delete secret", "danger"]],
      { cancel: "Keep it" },
    );
    if (!answer) return;
    try {
      await api.remove(`${at(name)}/secrets/${encodeURIComponent(id)}`);
      say("Secret deleted.");
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
      title("Namespace not found"),
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
    el("nav", { class: "crumbs", "aria-label": "Breadcrumbs" }, el("a", { href: "#/namespaces" }, "Namespaces")),
    el("div", { class: "heading" }, title(name), actions),
    status,
    el(
      "div",
      { class: "two" },
      section(
        "Settings",
        facts,
        saving(retention, "Save retention", () => ({ retention: retention.value.trim() })),
        saving(weight, "Save weight", () => ({ weight: Number(weight.value) })),
      ),
      section("Signing secrets", secrets, button("New secret", add)),
    ),
  );
}
