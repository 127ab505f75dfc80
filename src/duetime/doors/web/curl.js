// A timer as a command to paste: the request that would make it again.

import { now } from "./time.js";

// In single quotes a shell reads everything as it is, except the quote itself.
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
