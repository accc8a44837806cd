// pg-boss: insert() with the message id as job id; work() with batches and burst mode.
//
// Settings, from https://timgit.github.io/pg-boss/#/./api/workers and #/./api/jobs:
// - `batchSize` 100 and `burstWhenBatchFull`: fetch without a delay while there is a backlog;
// - `orderByCreatedOn: false` and `priority: false`: "disable this sorting for improved performance";
// - `insert()` takes arrays, and skips an id that exists: job ids deduplicate for as long as jobs are kept (7 days);
//   an id may occur once in a call;
// - jobs of one batch run concurrently, each in a transaction of its own; a batch is completed in one statement
//   after its handler returns, outside the business transactions.
import pg from 'pg'
import { PgBoss } from 'pg-boss'
import { batches, concurrently, distinct, drive, inTransaction, until, url } from './drive.mjs'

const QUEUE = 'orders'
const boss = new PgBoss({ connectionString: url, max: 8, schedule: false, supervise: false })
boss.on('error', (error) => console.error(error))
await boss.start()
await boss.createQueue(QUEUE)
const pool = new pg.Pool({ connectionString: url, max: 16, idleTimeoutMillis: 0 })

async function handle({ data }) {
  const client = await pool.connect()
  try {
    await inTransaction(client, data)
  } finally {
    client.release()
  }
}

const left = `SELECT EXISTS (SELECT FROM pgboss.job WHERE name = '${QUEUE}' AND state < 'completed') AS busy`

await drive({
  ingest: async (deliveries) => {
    for (const batch of batches(deliveries, 500)) {
      await boss.insert(QUEUE, distinct(batch).map((delivery) => ({ id: delivery.id, data: delivery.body })))
    }
  },
  process: async () => {
    await boss.work(
      QUEUE,
      { batchSize: 100, localConcurrency: 4, burstWhenBatchFull: true, pollingIntervalSeconds: 0.5,
        orderByCreatedOn: false, priority: false },
      (jobs) => concurrently(jobs, 4, handle),
    )
    await until(async () => !(await pool.query(left)).rows[0].busy)
    return () => boss.offWork(QUEUE)
  },
})
