// graphile-worker on PostgreSQL: jobs with `runAt`. As its pages on performance advise, the worker has a local queue and
// batches what it completes; it polls five times a second, so that a job is not late by the default's two seconds.

import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";
import { client, fail, poster, versionOf, working } from "./program.mjs";

const [role, connectionString] = process.argv.slice(2);
const CONCURRENT = 64;
const LOCAL_QUEUE = 500;
const POLL_MS = 200;
const COMPLETE_MS = 250;
const CONNECTIONS = 10;

// It would log each job; only what goes wrong is of interest.
const logger = new Logger(() => (level, message) => ["error", "warning"].includes(level) && console.error(message));

async function schedules() {
  const pgPool = new pg.Pool({ connectionString, max: CONNECTIONS });
  const utils = await makeWorkerUtils({ pgPool, logger });
  await client({
    version: versionOf("graphile-worker"),
    schedule: (timer) => utils.addJob("post", timer, { runAt: new Date(timer.payload.due) }),
    scheduleMany: (timers) =>
      utils.addJobs(timers.map((timer) => ({ identifier: "post", payload: timer, runAt: new Date(timer.payload.due) }))),
    left: async () => {
      const { rows } = await pgPool.query("SELECT count(*)::int AS left FROM graphile_worker.jobs");
      return rows[0].left;
    },
  });
}

async function works() {
  const post = poster(CONCURRENT);
  await run({
    preset: {
      worker: {
        connectionString,
        logger,
        concurrentJobs: CONCURRENT,
        maxPoolSize: CONNECTIONS,
        pollInterval: POLL_MS,
        localQueue: { size: LOCAL_QUEUE },
        completeJobBatchDelay: COMPLETE_MS,
        failJobBatchDelay: COMPLETE_MS,
      },
    },
    taskList: { post },
    crontab: "",
  });
  working();
}

await { client: schedules, worker: works }[role]().catch(fail);
