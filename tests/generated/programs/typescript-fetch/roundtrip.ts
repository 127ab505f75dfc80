// The round trip with the typescript-fetch client of openapi-generator.
import { deepStrictEqual as equal, ok } from "node:assert/strict";
import { env } from "node:process";
import { Configuration, OverviewApi, PlatformApi, ResponseError, Status, TimersApi } from "./client/index.js";
import { FailureFromJSON, PlatformFailureFromJSON } from "./client/index.js";

const later = new Date("2099-01-31T09:00:00Z");
const configuration = new Configuration({ basePath: env.DUETIME_URL!, apiKey: env.API_KEY! });
const timers = new TimersApi(configuration);
const at = { namespace: "default", id: "trip-1" };

const created = await timers.create({
  createTimer: {
    id: "trip-1",
    delay: "1h",
    callbackUrl: "http://127.0.0.1:9/hook",
    callbackHeaders: { "X-Tenant": "acme" },
    payload: { invoice: 42 },
    correlationId: "trip",
    retryPolicy: { maxRetries: 5, initialInterval: "10s" },
  },
});
equal([created.status, created.callbackSubject], [Status.Pending, null]);
equal([created.payload, created.callbackHeaders], [{ invoice: 42 }, { "X-Tenant": "acme" }]);
equal([created.retryPolicy.maxRetries, created.retryPolicy.giveUpOn], [5, []]);

equal(await timers.get(at), created);

const page = await timers.list({ correlationId: "trip", status: Status.Pending });
equal(page, { timers: [created], nextCursor: null });

const updated = await timers.update({ ...at, changes: { executeAt: later } });
equal([updated.executeAt, updated.payload], [later, { invoice: 42 }]);
equal([updated.callbackHeaders, updated.retryPolicy], [created.callbackHeaders, created.retryPolicy]);

const canceled = await timers.cancel(at);
equal([canceled.status, canceled.executedAt], [Status.Canceled, null]);

const one = { delay: "1h", callbackUrl: "http://127.0.0.1:9/hook" };
const batch = await timers.batch({
  batchIn: { timers: [{ ...one, id: "trip-2" }, { ...one, id: "trip-3", executeAt: later }] },
});
const [made, refused] = batch.results;
equal([made!.status, made!.timer?.id, made!.error], [200, "trip-2", undefined]);
equal([refused!.status, refused!.error?.details], [400, { field: "delay" }]);

const platform = new PlatformApi(configuration);
const callback = { type: "http", url: "http://127.0.0.1:9/platform", payload: [1] } as const;
const summary = await platform.platformCreate({ createPlatformTimer: { executeAt: later, callback } });
const { data: shown } = await platform.platformGet({ id: summary.data.id });
equal([shown.executeAt, shown.callbackUrl], [later, "http://127.0.0.1:9/platform"]);
equal([shown.callbackPayload, shown.lastError], [[1], null]);

const overview = await new OverviewApi(configuration).overview();
equal(overview.statuses.pending, 2);

try {
  await platform.platformGet({ id: "00000000-0000-4000-8000-000000000000" });
  ok(false, "no error");
} catch (error) {
  ok(error instanceof ResponseError);
  const failure = PlatformFailureFromJSON(await error.response.json());
  equal([error.response.status, failure.code, failure.data], [404, 3, null]);
}

try {
  await timers.get({ ...at, id: "missing" });
  ok(false, "no error");
} catch (error) {
  ok(error instanceof ResponseError);
  const failure = FailureFromJSON(await error.response.json());
  equal([error.response.status, failure.error], [404, "TIMER_NOT_FOUND"]);
  ok(failure.message && failure.timestamp instanceof Date);
}
