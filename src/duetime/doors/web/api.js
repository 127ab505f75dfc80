// The only way to the service: its public API, with the session cookie.

// A message as a sentence: with a capital, unless it starts with a field name such as callbackUrl, and a full stop.
const sentence = (text) =>
  text.replace(/^[a-z]+(?=[ ,:])/, (word) => word[0].toUpperCase() + word.slice(1)).replace(/([^.?!])$/, "$1.");

export class ApiError extends Error {
  constructor(status, body) {
    super(sentence(body?.message ?? `the service returned HTTP ${status}`));
    this.status = status;
    this.code = body?.error ?? "";
    this.field = body?.details?.field ?? null;
  }
}

const BASE = "/api/v1";

async function send(method, url, body, signal) {
  const init = { method, signal, headers: {}, credentials: "same-origin", cache: "no-store" };
  if (body !== undefined) {
    init.headers["Content-Type"] = "application/json";
    init.body = typeof body === "string" ? body : JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(url, init);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The service can't be reached. Is it running?" });
  }
  const text = await answer.text();
  if (answer.ok) return text;
  let said = null;
  try {
    said = JSON.parse(text);
  } catch {
    // A proxy in between returned a page of its own.
  }
  const failure = new ApiError(answer.status, said);
  if (answer.status === 401 && url.startsWith(BASE)) document.dispatchEvent(new Event("signedout"));
  throw failure;
}

const parsed = (text) => (text ? JSON.parse(text) : null);

export const get = async (path, signal) => parsed(await send("GET", BASE + path, undefined, signal));
export const post = async (path, body, signal) => parsed(await send("POST", BASE + path, body, signal));
export const put = async (path, body) => parsed(await send("PUT", BASE + path, body));
export const patch = async (path, body) => parsed(await send("PATCH", BASE + path, body));
export const remove = (path) => send("DELETE", BASE + path);

export const session = {
  look: async () => parsed(await send("GET", "/session")),
  begin: (apiKey) => send("POST", "/session", { apiKey }),
  end: () => send("DELETE", "/session"),
};

export const events = () => new EventSource(`${BASE}/events`);

// Keeps all digits of a number, where the browser supports it: JSON.parse alone would round large ones. A number that it
// would round becomes an object that JSON.stringify writes as it was.
const exact = (text) =>
  JSON.rawJSON
    ? JSON.parse(text, (_, value, { source }) =>
        typeof value === "number" && String(value) !== source ? JSON.rawJSON(source) : value,
      )
    : JSON.parse(text);

export const getExact = async (path, signal) => exact(await send("GET", BASE + path, undefined, signal));

// A timer, with its payload and metadata exactly as stored.
export async function timer(path, signal) {
  const text = await send("GET", BASE + path, undefined, signal);
  const { payload, metadata } = exact(text);
  return { ...JSON.parse(text), payload, metadata };
}

export const query = (filters) => {
  const given = Object.entries(filters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return new URLSearchParams(given).toString();
};

export const timerPath = (namespace, id) => `/timers/${encodeURIComponent(namespace)}/${encodeURIComponent(id)}`;
export const timerLink = (timer) => `#${timerPath(timer.namespace, timer.id)}`;

let contract = null;
// The schemas of the OpenAPI document: the rules that the service itself enforces.
export async function schemas() {
  contract ??= send("GET", `${BASE}/openapi.json`).then((text) => JSON.parse(text).components.schemas);
  return contract;
}
