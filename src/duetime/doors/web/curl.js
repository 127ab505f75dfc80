// A timer as a curl command that creates the same timer again.

import { now } from "./time.js";

// Within single quotes a shell takes every character literally, except the quote itself.
export const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function curlOf(timer) {
  const kept = [
    "namespace",
    "callbackUrl",
    "callbackSubject",
    "callbackMethod",
    "payload",
    "metadata",
    "correlationId",
    "retryPolicy",
    "callbackTimeout",
    "responseProtocol",
  ];
  const asked = { delay: "10m" };
  for (const name of kept) if (timer[name] !== null && timer[name] !== undefined) asked[name] = timer[name];
  if (Object.keys(timer.callbackHeaders).length) asked.callbackHeaders = timer.callbackHeaders;
  if (Date.parse(timer.executeAt) > now()) {
    delete asked.delay;
    asked.executeAt = timer.executeAt;
  }
  return [
    `curl -X POST ${quoted(`${location.origin}/api/v1/timers`)}`,
    `-H "X-API-Key: $API_KEY"`,
    `-H 'Content-Type: application/json'`,
    `-d ${quoted(JSON.stringify(asked, null, 2))}`,
  ].join(" \\\n  ");
}
