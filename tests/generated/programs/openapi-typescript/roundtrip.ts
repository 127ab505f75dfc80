// The round trip with openapi-fetch and the types of openapi-typescript.
import { deepStrictEqual as equal, ok } from "node:assert/strict";
import { env } from "node:process";
import createClient from "openapi-fetch";
import type { paths } from "./api.js";

const later = "2099-01-31T09:00:00.000Z";
const client = createClient<paths>({ baseUrl: env.DUETIME_URL!, headers: { "X-API-Key": env.API_KEY! } });
const one = "/api/v1/timers/{namespace}/{id}";
const path = { namespace: "default", id: "trip-1" };

function good<T>(answer: { data?: T; error?: unknown }): T {
  ok(answer.data !== undefined, JSON.stringify(answer.error));
  return answer.data;
}

const created = good(
  await client.POST("/api/v1/timers", {
    body: {
      id: "trip-1",
      delay: "1h",
      callbackUrl: "http://127.0.0.1:9/hook",
      callbackHeaders: { "X-Tenant": "acme" },
      payload: { invoice: 42 },
      correlationId: "trip",
      retryPolicy: { maxRetries: 5, initialInterval: "10s" },
    },
  }),
);
equal([created.status, created.callbackSubject], ["pending", null]);
equal([created.payload, created.callbackHeaders], [{ invoice: 42 }, { "X-Tenant": "acme" }]);
equal([created.retryPolicy.maxRetries, created.retryPolicy.giveUpOn], [5, []]);

equal(good(await client.GET(one, { params: { path } })), created);

const query = { correlationId: "trip", status: "pending" } as const;
const page = good(await client.GET("/api/v1/timers", { params: { query } }));
equal([page.timers, page.nextCursor], [[created], null]);

const updated = good(await client.PUT(one, { params: { path }, body: { executeAt: later } }));
equal([updated.executeAt, updated.payload], [later, { invoice: 42 }]);
equal([updated.callbackHeaders, updated.retryPolicy], [created.callbackHeaders, created.retryPolicy]);

const canceled = good(await client.POST(`${one}/cancel`, { params: { path } }));
equal([canceled.status, canceled.executedAt], ["canceled", null]);

const timer = { delay: "1h", callbackUrl: "http://127.0.0.1:9/hook" };
const batch = good(
  await client.POST("/api/v1/timers/batch", {
    body: { timers: [{ ...timer, id: "trip-2" }, { ...timer, id: "trip-3", executeAt: later }] },
  }),
);
const [made, refused] = batch.results;
equal([made!.status, made!.timer?.id, made!.error], [200, "trip-2", undefined]);
equal([refused!.status, refused!.error?.details], [400, { field: "delay" }]);

const callback = { type: "http", url: "http://127.0.0.1:9/platform", payload: [1] } as const;
const summary = good(await client.POST("/timers", { body: { execute_at: later, callback } }));
const { data: shown } = good(await client.GET("/timers/{id}", { params: { path: { id: summary.data.id } } }));
equal([shown.execute_at, shown.callback_url], [later, "http://127.0.0.1:9/platform"]);
equal([shown.callback_payload, shown.last_error], [[1], null]);

const overview = good(await client.GET("/api/v1/overview"));
equal(overview.statuses.pending, 2);

const nobody = await client.GET("/timers/{id}", { params: { path: { id: "00000000-0000-4000-8000-000000000000" } } });
equal([nobody.response.status, nobody.error?.code, nobody.error?.data], [404, 3, null]);

const missing = await client.GET(one, { params: { path: { ...path, id: "missing" } } });
equal([missing.response.status, missing.error?.error], [404, "TIMER_NOT_FOUND"]);
ok(missing.error?.message);
