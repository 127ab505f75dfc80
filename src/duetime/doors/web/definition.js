// The form of what a timer is: when, where to, and what with. Making one and changing one use the same.

import * as api from "./api.js";
import { button, el } from "./dom.js";
import { allRight, area, blame, choice, field, text } from "./fields.js";
import { fault, jsonFault, rulesOf } from "./rules.js";
import { EXAMPLES, local, offsetAt, parseWhen, relative, utc, zone } from "./time.js";

const pretty = (value) => (value === null || value === undefined ? "" : JSON.stringify(value, null, 2));

function headersFault(typed) {
  for (const line of typed.split("\n").filter((one) => one.trim())) {
    const [name, ...rest] = line.split(":");
    if (!rest.length) return `Each line is a name, a colon and a value: “${line.slice(0, 40)}” has no colon.`;
    if (!/^[A-Za-z0-9!#$%&'*+.^_`|~-]+$/.test(name.trim())) return `“${name.slice(0, 40)}” is not a header name.`;
  }
  return null;
}

const headersOf = (typed) =>
  Object.fromEntries(
    typed
      .split("\n")
      .filter((line) => line.trim())
      .map((line) => [line.slice(0, line.indexOf(":")).trim(), line.slice(line.indexOf(":") + 1).trim()]),
  );

/* `before` is the timer to change, or null for a new one. Answers with { node, body(), blame(error) }: `body` is the
   request as text, so that a payload goes out as it was written, or null while something is wrong. */
export async function definitionForm(before, namespaces = [], chosen = {}) {
  const rules = await rulesOf("CreateTimer");
  const rule =
    (...path) =>
    (value) =>
      fault(value, rules.of(...path));
  const policy = before?.retryPolicy ?? {};

  const preview = el("p", { class: "preview", "aria-live": "polite" });
  const when = field(
    before ? "New time" : "When",
    text({ placeholder: before ? "leave empty to keep it" : "in 10 minutes" }),
    {
      required: !before,
      name: "executeAt",
      hint: `In your own words, in your time zone: ${zone}.`,
      check: (value) => parseWhen(value).error ?? null,
    },
  );
  const look = () => {
    const { at, error, note } = when.value.trim() ? parseWhen(when.value) : {};
    preview.replaceChildren(
      ...(at && !error
        ? [
            el("strong", {}, local(at)),
            ` ${zone} (${offsetAt(at)}) · `,
            el("span", {}, utc(at)),
            ` · ${relative(utc(at))}`,
            note ? ` · ${note}` : "",
          ]
        : []),
    );
  };
  when.input.addEventListener("input", look);
  const ticking = setInterval(() => (preview.isConnected ? look() : clearInterval(ticking)), 1_000);
  const chips = el(
    "div",
    { class: "chips" },
    ...EXAMPLES.map((example) =>
      button(example, () => {
        when.input.value = example;
        when.input.dispatchEvent(new Event("input"));
        when.input.focus();
      }),
    ),
  );

  const url = field(
    "Callback URL",
    text({
      type: "url",
      inputmode: "url",
      placeholder: "https://example.com/hooks/timer",
      value: before?.callbackUrl ?? "",
    }),
    {
      required: !before?.callbackSubject,
      name: "callbackUrl",
      hint: "What is called at that time.",
      check: rule("callbackUrl"),
    },
  );
  const payload = field("Payload", area({ placeholder: '{"order": 17}' }, pretty(before?.payload)), {
    name: "payload",
    hint: "Any JSON: it is sent with the callback as you write it.",
    check: jsonFault,
  });
  const id = field("Id", text({ placeholder: "made for you when empty" }), {
    name: "id",
    hint: "Unique in its namespace.",
    check: rule("id"),
  });
  const namespace = field(
    "Namespace",
    choice(
      namespaces.map((one) => [one]),
      namespaces.includes(chosen.namespace) ? chosen.namespace : "default",
    ),
    { name: "namespace" },
  );
  const correlation = field("Correlation id", text({ placeholder: "order-17", value: before?.correlationId ?? "" }), {
    name: "correlationId",
    required: Boolean(before?.correlationId), // The API can change it, and not take it away.
    hint: "What belongs together, to list it by.",
    check: rule("correlationId"),
  });

  const methods = rules.of("callbackMethod").enum ?? ["POST"];
  const method = field(
    "Method",
    choice(
      [...methods].sort((a, b) => Number(b === "POST") - Number(a === "POST")).map((one) => [one]),
      before?.callbackMethod ?? "POST",
    ),
    { name: "callbackMethod" },
  );
  const timeout = field("Timeout of an attempt", text({ placeholder: "30s", value: before?.callbackTimeout ?? "" }), {
    name: "callbackTimeout",
    hint: "From 1ms to 1h, like 30s.",
    check: rule("callbackTimeout"),
  });
  const protocol = field(
    "What completes it",
    choice(
      [
        ["answer", '200 with {"ok": true}'],
        ["status", "any 2xx answer"],
      ],
      before?.responseProtocol ?? "answer",
    ),
    { name: "responseProtocol" },
  );
  const headers = field(
    "Headers",
    area({
      rows: "3",
      placeholder: "X-Tenant: acme",
      value: Object.entries(before?.callbackHeaders ?? {})
        .map(([name, value]) => `${name}: ${value}`)
        .join("\n"),
    }),
    {
      name: "callbackHeaders",
      hint: "One on each line: a name, a colon, a value.",
      check: headersFault,
    },
  );
  const retry = (name, label, hint, placeholder) =>
    field(label, text({ placeholder, value: policy[name] ?? "" }), {
      name: `retryPolicy.${name}`,
      hint,
      check: rule("retryPolicy", name),
    });
  const retries = [
    retry("maxRetries", "Retries", "How many more attempts a failed one is given.", "3"),
    retry("initialInterval", "First wait", "Before the first retry, like 30s.", "30s"),
    retry("backoffMultiplier", "Each wait is longer by", "A factor from 1 on.", "2"),
    retry("maxInterval", "Longest wait", "Like 10m.", "10m"),
    retry("maxRetryAttemptsDuration", "Give up after", "All retries together, like 24h.", "24h"),
  ];
  const jitter = field(
    "Draw each wait by chance",
    choice(
      [
        ["true", "yes, from 0 to the wait"],
        ["false", "no, the whole wait"],
      ],
      String(policy.jitter ?? true),
    ),
    { name: "retryPolicy.jitter" },
  );
  const metadata = field("Metadata", area({ rows: "3" }, pretty(before?.metadata)), {
    name: "metadata",
    hint: "Any JSON, kept for you and not sent.",
    check: jsonFault,
  });

  const http = before?.callbackSubject ? [] : [url, method];
  const fields = [
    when,
    ...http,
    payload,
    ...(before ? [] : [id, namespace]),
    correlation,
    timeout,
    protocol,
    headers,
    ...retries,
    jitter,
    metadata,
  ];
  const has = (...some) => some.filter((one) => fields.includes(one)).map((one) => one.node);

  const node = el(
    "div",
    { class: "form" },
    when.node,
    chips,
    preview,
    ...has(url, payload),
    el("div", { class: "pair" }, ...has(id, namespace, correlation)),
    el(
      "details",
      {},
      el("summary", {}, "Delivery: method, headers, timeout, answer"),
      el("div", { class: "pair" }, ...has(method, timeout, protocol)),
      headers.node,
    ),
    el(
      "details",
      {},
      el("summary", {}, "Retries"),
      el("div", { class: "pair" }, ...retries.map((one) => one.node), jitter.node),
    ),
    el("details", {}, el("summary", {}, "Metadata"), metadata.node),
  );

  function body() {
    if (!allRight(fields)) return null;
    const asked = {};
    const put = (one, value) => {
      if (fields.includes(one) && value !== "") asked[one.name] = value;
    };
    if (when.value.trim()) {
      const { at, delay } = parseWhen(when.value);
      if (delay) asked.delay = delay;
      else asked.executeAt = utc(at);
    }
    for (const one of [url, id, namespace, correlation, method, timeout, protocol]) put(one, one.value.trim());
    const given = Object.fromEntries(
      retries
        .filter((one) => one.value.trim())
        .map((one) => [
          one.name.split(".")[1],
          /maxRetries|Multiplier/.test(one.name) ? Number(one.value) : one.value.trim(),
        ]),
    );
    asked.retryPolicy = { ...given, jitter: jitter.value === "true" };
    asked.callbackHeaders = headersOf(headers.value);
    const written = [payload, metadata]
      .filter((one) => one.value !== one.input.defaultValue)
      .map((one) => `,"${one.name}":${one.value.trim() || "null"}`);
    return `${JSON.stringify(asked).slice(0, -1)}${written.join("")}}`;
  }

  const named = (error) => (error.field === "delay" ? Object.assign(error, { field: "executeAt" }) : error);
  return { node, fields, body, blame: (error) => blame(fields, named(error)), focus: () => when.input.focus() };
}

export const namespaceNames = async (signal) =>
  (await api.get("/namespaces", signal)).namespaces.map((one) => one.name);
