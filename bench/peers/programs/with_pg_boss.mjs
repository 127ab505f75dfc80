// pg-boss on PostgreSQL: jobs with `startAfter`. Its workers fetch batches, go on at once while batches are full
// (`burstWhenBatchFull`), settle each job by itself (`perJobResults`), and else poll at the shortest interval that it
// allows, half a second.

import { PgBoss } from "pg-boss";
import { client, fail, poster, versionOf, working } from "./program.mjs";

const [role, connectionString] = process.argv.slice(2);
const QUEUE = "timers";
const BATCH = 100;
const WORKERS = 4;
const CONNECTIONS = 20;

async function start() {
  const boss = new PgBoss({ connectionString, max: CONNECTIONS });
  boss.on("error", console.error);
  await boss.start();
  await boss.createQueue(QUEUE);
  return boss;
}

async function schedules() {
  const boss = await start();
  await client({
    version: versionOf("pg-boss"),
    schedule: (timer) => boss.send(QUEUE, timer, { startAfter: new Date(timer.payload.due) }),
    scheduleMany: (timers) =>
      boss.insert(QUEUE, timers.map((timer) => ({ data: timer, startAfter: new Date(timer.payload.due) }))),
    left: async () => {
      const { rows } = await boss.getDb().executeSql("SELECT count(*)::int AS left FROM pgboss.job WHERE state < 'completed'");
      return rows[0].left;
    },
  });
}

async function works() {
  const boss = await start();
  const post = poster(BATCH * WORKERS);
  const options = {
    batchSize: BATCH,
    localConcurrency: WORKERS,
    pollingIntervalSeconds: 0.5,
    burstWhenBatchFull: true,
    perJobResults: true,
  };
  await boss.work(QUEUE, options, (jobs) =>
    Promise.all(
      jobs.map(({ id, data }) =>
        post(data).then(
          () => ({ id, status: "completed" }),
          (error) => ({ id, status: "failed", output: { message: error.message } }),
        ),
      ),
    ),
  );
  working();
}

await { client: schedules, worker: works }[role]().catch(fail);
