// What the programs of the Node.js peers share, above all the client that schedules as it is told on stdin, one JSON
// line each. `program.py` speaks the same lines.

import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { Agent } from "undici";

const IN_FLIGHT = 64;
const BATCHES_IN_FLIGHT = 2;
const GRANT_WAIT_MS = 2;

export const say = (answer) => process.stdout.write(JSON.stringify(answer) + "\n");

export const versionOf = (name) =>
  JSON.parse(readFileSync(new URL(`../node_modules/${name}/package.json`, import.meta.url))).version;

const payload = (due) => ({
  due,
  order: "8f14e45f-ceea-467f",
  note: "remind the customer that the basket is still there",
});

/** A function that POSTs one timer's JSON, on kept connections. */
export function poster(connections) {
  const agent = new Agent({ connections, pipelining: 1 });
  const headers = { "content-type": "application/json", "x-tenant": "acme" };
  return async ({ url, payload }) => {
    const { origin, pathname } = new URL(url);
    const { statusCode, body } = await agent.request({
      origin,
      path: pathname,
      method: "POST",
      headers,
      body: JSON.stringify(payload),
    });
    await body.dump();
    if (statusCode >= 300) throw new Error(`the receiver answered ${statusCode}`);
  };
}

/** Schedules what one line asks for; `granted()` is how many may be scheduled by now. */
async function schedule(peer, ask, granted) {
  const started = performance.now();
  const over = () => ask.seconds !== null && performance.now() - started >= ask.seconds * 1000;
  let taken = 0;
  let count = 0;
  const caller = async () => {
    while (!over()) {
      const size = Math.min(ask.batch, ask.count === null ? ask.batch : ask.count - taken);
      if (size <= 0) return;
      if (taken + size > granted()) {
        await sleep(GRANT_WAIT_MS);
        continue;
      }
      const first = taken;
      taken += size;
      const due = ask.due === null ? Date.now() + ask.lead_ms : ask.due + first * ask.step_ms;
      const timers = Array.from({ length: size }, () => ({ url: ask.url, payload: payload(due) }));
      await (ask.batch > 1 ? peer.scheduleMany(timers) : peer.schedule(timers[0]));
      count += size;
    }
  };
  const callers = Math.min(ask.batch > 1 ? BATCHES_IN_FLIGHT : IN_FLIGHT, ask.count ?? IN_FLIGHT);
  await Promise.all(Array.from({ length: callers }, caller));
  return { count, seconds: (performance.now() - started) / 1000 };
}

/** Answers the lines on stdin with `peer` until they end. */
export async function client(peer) {
  let granted = Infinity;
  say({ version: peer.version });
  for await (const line of createInterface({ input: process.stdin })) {
    const ask = JSON.parse(line);
    if (ask.what === "grant") granted = ask.total;
    else if (ask.what === "left") say({ left: await peer.left() });
    else if (ask.what === "schedule") {
      granted = ask.granted ?? Infinity;
      // Not awaited: grants come while it runs.
      schedule(peer, ask, () => granted).then(say, fail);
    }
  }
  process.exit(0);
}

/** Says that the worker works. */
export const working = () => say({ ready: true });

export function fail(error) {
  console.error(error);
  process.exit(1);
}
