// The form of a timer: its time, its target and its payload. Creating and editing share it.

import * as api from "./api.js";
import { button, el } from "./dom.js";
import { allRight, area, blame, choice, field, text } from "./fields.js";
import { DURATION, fault, jsonFault, rulesOf } from "./rules.js";
import { EXAMPLES, local, parseWhen, relative, utc, zone, zoneAt } from "./time.js";

const pretty = (value) => (value === null || value === undefined ? "" : JSON.stringify(value, null, 2));

function headersFault(typed) {
  for (const line of typed.split("\n").filter((one) => one.trim())) {
    const [name, ...rest] = line.split(":");
    if (!rest.length) return `Write each header as name: value. “${line.slice(0, 40)}” has no colon.`;
    if (!/^[A-Za-z0-9!#$%&'*+.^_`|~-]+$/.test(name.trim())) return `“${name.slice(0, 40)}” is not a header name.`;
  }
  return null;
}

const numbersOf = (typed) => typed.split(/[\s,]+/).filter(Boolean).map(Number);

const statusesFault = (typed) =>
  numbersOf(typed).every((one) => Number.isInteger(one) && one >= 300 && one <= 599)
    ? null
    : "Write statuses from 300 to 599, separated by commas.";

// What completes a timer, by its responseProtocol.
export const COMPLETED_BY = {
  answer: 'HTTP 200 with {"ok": true}, or any 2xx with an empty body',
  status: "any 2xx response",
};

const headersOf = (typed) =>
  Object.fromEntries(
    typed
      .split("\n")
      .filter((line) => line.trim())
      .map((line) => [line.slice(0, line.indexOf(":")).trim(), line.slice(line.indexOf(":") + 1).trim()]),
  );

/* `before` is the timer to change, or null for a new one. Returns { node, body(), blame(error) }: `body` is the
   request as text, so that a payload is sent exactly as typed, or null while a field is invalid. */
export async function definitionForm(before, namespaces = [], chosen = {}) {
  const rules = await rulesOf("CreateTimer");
  const rule =
    (path, expected) =>
    (value) =>
      fault(value, rules.of(...path.split(".")), expected);
  const policy = before?.retryPolicy ?? {};

  const preview = el("p", { class: "preview", "aria-live": "polite" });
  const when = field(
    before ? "New time" : "When",
    text({ placeholder: before ? "leave empty to keep the time" : "in 10 minutes" }),
    {
      required: !before,
      name: "executeAt",
      hint: `A duration or a time in your time zone, ${zone}.`,
      check: (value) => parseWhen(value).error ?? null,
    },
  );
  const look = () => {
    const { at, error, note } = when.value.trim() ? parseWhen(when.value) : {};
    preview.replaceChildren(
      ...(at && !error
        ? [
            el("strong", {}, local(at)),
            ` ${zoneAt(at)} · `,
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
      hint: "Duetime sends an HTTP request here when the timer is due.",
      check: rule("callbackUrl", "Must be an http:// or https:// URL in ASCII, without spaces, user name or password."),
    },
  );
  const payload = field("Payload", area({ placeholder: '{"order": 17}' }, pretty(before?.payload)), {
    name: "payload",
    hint: "Any JSON. It is part of the request body, exactly as typed.",
    check: jsonFault,
  });
  const id = field("Id", text({ placeholder: "generated if empty" }), {
    name: "id",
    hint: "Unique in its namespace.",
    check: rule("id", "Must not contain control characters."),
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
    required: Boolean(before?.correlationId), // The API can change it but not remove it.
    hint: "A label for related timers; you can filter by it.",
    check: rule("correlationId", "Must not contain NUL characters."),
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
  const timeout = field("Timeout per attempt", text({ placeholder: "30s", value: before?.callbackTimeout ?? "" }), {
    name: "callbackTimeout",
    hint: "How long an attempt may take, such as 30s.",
    check: rule("callbackTimeout", DURATION),
  });
  const protocol = field(
    "Completed by",
    choice(Object.entries(COMPLETED_BY), before?.responseProtocol ?? "answer"),
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
      hint: "One per line, as name: value.",
      check: headersFault,
    },
  );
  const retry = (name, label, hint, placeholder) =>
    field(label, text({ placeholder, value: policy[name] ?? "" }), {
      name: `retryPolicy.${name}`,
      hint,
      check: rule(`retryPolicy.${name}`, DURATION),
    });
  const retries = [
    retry("maxRetries", "Retries", "How many times Duetime retries, 0 to 1000.", "3"),
    retry("initialInterval", "Initial interval", "The wait before the first retry, such as 30s.", "30s"),
    retry("backoffMultiplier", "Backoff multiplier", "Each wait is this many times the one before; at least 1.", "2"),
    retry("maxInterval", "Maximum interval", "The longest wait between retries, such as 10m.", "10m"),
    retry("maxRetryAttemptsDuration", "Give up after", "No retry starts later than this after the first attempt.", "24h"),
  ];
  const giveUpOn = field(
    "Give up on statuses",
    text({ placeholder: "400, 404, 410", value: (policy.giveUpOn ?? []).join(", ") }),
    {
      name: "retryPolicy.giveUpOn",
      hint: "A response with one of these statuses fails the timer at once.",
      check: statusesFault,
    },
  );
  const jitter = field(
    "Jitter",
    choice(
      [
        ["true", "on"],
        ["false", "off"],
      ],
      String(policy.jitter ?? true),
    ),
    { name: "retryPolicy.jitter", hint: "Each wait is a random part of the interval." },
  );
  const metadata = field("Metadata", area({ rows: "3" }, pretty(before?.metadata)), {
    name: "metadata",
    hint: "Any JSON. Stored with the timer, not sent.",
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
    giveUpOn,
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
      el("summary", {}, "Delivery: method, headers, timeout, response"),
      el("div", { class: "pair" }, ...has(method, timeout)),
      protocol.node,
      headers.node,
    ),
    el(
      "details",
      {},
      el("summary", {}, "Retries"),
      el("div", { class: "pair" }, ...[...retries, giveUpOn, jitter].map((one) => one.node)),
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
    asked.retryPolicy = { ...given, giveUpOn: numbersOf(giveUpOn.value), jitter: jitter.value === "true" };
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
