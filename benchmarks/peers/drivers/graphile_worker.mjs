// graphile-worker: addJobs() in bulk; a runner with local queue and batched completion. `graphile_worker.mjs [dedupe]`
//
// Settings, from https://worker.graphile.org/docs/performance ("Quick stats"): concurrentJobs 24, maxPoolSize 25,
// localQueue { size: 500 }, completeJobBatchDelay 0, failJobBatchDelay 0; prepared statements are on by default.
// - https://worker.graphile.org/docs/job-key: a key deduplicates while its job waits; a completed job is deleted,
//   and its key with it. A key may occur once in a call of addJobs().
// - `dedupe`: no job keys, and the textbook's INSERT … ON CONFLICT in the task's transaction, which lasts.
// - the task commits its own transaction through withPgClient; the job is completed afterwards, in another one.
import pg from 'pg'
import { Logger, makeWorkerUtils, run } from 'graphile-worker'
import { INBOX, batches, distinct, drive, inTransaction, until, url } from './drive.mjs'

const lasting = process.argv[2] === 'dedupe'
const utils = await makeWorkerUtils({ connectionString: url })
await utils.migrate()
const pool = new pg.Pool({ connectionString: url, max: 1, idleTimeoutMillis: 0 })
if (lasting) await pool.query(INBOX)
const preset = {
  worker: {
    connectionString: url,
    concurrentJobs: 24,
    maxPoolSize: 25,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger: new Logger(() => (level, message) => level === 'error' && console.error(message)),
  },
}
const taskList = {
  pay: ({ body, id }, { withPgClient }) => withPgClient((client) => inTransaction(client, body, id)),
}
const keyed = (delivery) => ({ identifier: 'pay', payload: { body: delivery.body }, jobKey: delivery.id })
const plain = (delivery) => ({ identifier: 'pay', payload: delivery })
const left = 'SELECT EXISTS (SELECT FROM graphile_worker._private_jobs) AS busy'

await drive({
  ingest: async (deliveries) => {
    for (const batch of batches(deliveries, 500)) {
      await utils.addJobs(lasting ? batch.map(plain) : distinct(batch).map(keyed))
    }
  },
  process: async () => {
    const runner = await run({ preset, taskList, noHandleSignals: true })
    await until(async () => !(await pool.query(left)).rows[0].busy)
    return () => runner.stop()
  },
})
