// pg-transactional-outbox, its inbox: `pg_transactional_outbox.mjs polling | replication`.
//
// Settings, from https://github.com/Zehelein/pg-transactional-outbox/blob/main/lib/README.md:
// - storing: initializeMessageStorage() on a client in a transaction; here a hundred messages share one transaction,
//   which is faster than one each ("Message Storage"); ON CONFLICT (id) DO NOTHING deduplicates;
// - `concurrency: 'parallel'`, no segment: messages in any order, several at a time;
// - polling: nextMessagesBatchSize 100, nextMessagesPollingIntervalInMs 10 (default 500), and a batch size strategy
//   ("Polling listener batch size strategy") that refills in bulk once most of a batch is done: the default one asks
//   for one message again and again, and each question reads all that is waiting;
// - polling function: with the fix that lib/CHANGELOG.md describes under 0.6.4 (look at the lease before locking the
//   row); without it now and then a message waits five seconds for its next attempt;
// - replication: a semaphore of 16 ("Replication listener concurrency strategy"; the default is one at a time);
// - 16 handler connections; attempts and poisonous message protection stay on, as advised for an inbox;
// - each message is locked, handled and marked processed in one transaction of its own.
import { setImmediate } from 'node:timers/promises'
import pg from 'pg'
import {
  DatabaseSetupExporter, createReplicationSemaphoreConcurrencyController, executeTransaction, getDisabledLogger,
  initializeMessageStorage, initializePollingMessageListener, initializeReplicationMessageListener,
} from 'pg-transactional-outbox'
import { batches, drive, takePayment, until, url } from './drive.mjs'

const polling = process.argv[2] === 'polling'
const BATCH = 100
const parsed = new URL(url)
const database = parsed.pathname.slice(1)
const login = { host: parsed.hostname, port: Number(parsed.port), user: parsed.username, password: parsed.password, database }
const names = { outboxOrInbox: 'inbox', database, schema: 'public', table: 'inbox', listenerRole: login.user }
const config = {
  outboxOrInbox: 'inbox',
  dbListenerConfig: login,
  dbHandlerConfig: { ...login, max: 16, idleTimeoutMillis: 0 },
  settings: {
    dbSchema: 'public',
    dbTable: 'inbox',
    enableMaxAttemptsProtection: true,
    enablePoisonousMessageProtection: true,
    nextMessagesFunctionName: 'next_inbox_messages',
    nextMessagesBatchSize: BATCH,
    nextMessagesPollingIntervalInMs: 10,
    dbPublication: 'inbox_publication',
    dbReplicationSlot: `${database}_slot`,
  },
}

async function setUp(pool) {
  if (polling) {
    const script = DatabaseSetupExporter.createPollingScript({ ...names, nextMessagesName: 'next_inbox_messages' }, true)
    const fixed = script.replace(/EXIT WHEN .*;/, '$&\nIF loop_row.locked_until > NOW() THEN CONTINUE; END IF;')
    if (fixed === script) throw new Error('the polling function has changed: is the fix still needed?')
    await pool.query(fixed)
    return
  }
  const { dbPublication: publication, dbReplicationSlot: replicationSlot } = config.settings
  const script = DatabaseSetupExporter.createReplicationScript({ ...names, publication, replicationSlot }, true)
  // "must be run in a separate database transaction": statement by statement
  for (const statement of script.split(';')) await pool.query(statement)
}

const logger = { ...getDisabledLogger(), error: console.error }
const pool = new pg.Pool({ connectionString: url, max: 2, idleTimeoutMillis: 0 })
await setUp(pool)
const store = initializeMessageStorage(config, logger)

const handler = {
  aggregateType: 'order',
  messageType: 'order_paid',
  handle: (message, client) => takePayment(client, message.payload),
}

function start() {
  if (polling) {
    const batchSizeStrategy = async (processing) => {
      if (processing <= BATCH / 5) return BATCH
      await setImmediate() // the listener asks again at once, and would keep every other callback waiting
      return 0
    }
    return initializePollingMessageListener(config, [handler], logger, { batchSizeStrategy })
  }
  const concurrencyStrategy = createReplicationSemaphoreConcurrencyController(16)
  return initializeReplicationMessageListener(config, [handler], logger, { concurrencyStrategy })
}

const left = 'SELECT EXISTS (SELECT FROM inbox WHERE processed_at IS NULL) AS busy'

await drive({
  ingest: async (deliveries) => {
    for (const batch of batches(deliveries, BATCH)) {
      await executeTransaction(await pool.connect(), async (client) => {
        for (const { id, body } of batch) {
          await store({
            id, aggregateType: 'order', aggregateId: String(body.order), messageType: 'order_paid', payload: body,
            concurrency: 'parallel',
          }, client)
        }
      })
    }
  },
  process: async () => {
    const [shutdown] = start()
    await until(async () => !(await pool.query(left)).rows[0].busy)
    return shutdown
  },
})
