// What the JavaScript drivers share: the workload, the job of every contender, and the conversation with p16.py.
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'

export const url = process.env.DATABASE_URL

// named: node-postgres prepares it once a connection (https://node-postgres.com/features/queries#prepared-statements)
const TAKE = { name: 'take', text: 'UPDATE account SET balance = balance + $1 WHERE id = $2' }
const ORDER = { name: 'order', text: 'INSERT INTO orders (number, account, amount) VALUES ($1, $2, $3)' }
const CLAIM = { name: 'claim', text: 'INSERT INTO inbox (message_id) VALUES ($1) ON CONFLICT DO NOTHING' }
export const INBOX =
  'CREATE TABLE inbox (message_id text PRIMARY KEY, received_at timestamptz NOT NULL DEFAULT now())'

let first = null

/** The job of every contender, in the transaction that the client is in. */
export async function takePayment(client, body) {
  first ??= performance.now()
  await client.query({ ...TAKE, values: [body.amount, body.account] })
  await client.query({ ...ORDER, values: [body.order, body.account, body.amount] })
}

/** The textbook's dedupe, for peers whose own does not last: true the first time. */
async function claim(client, id) {
  return (await client.query({ ...CLAIM, values: [id] })).rowCount === 1
}

/** The job in a transaction of its own; with an `id` it happens once for that. */
export async function inTransaction(client, body, id) {
  await client.query('BEGIN')
  try {
    if (id === undefined || (await claim(client, id))) await takePayment(client, body)
    await client.query('COMMIT')
  } catch (error) {
    await client.query('ROLLBACK')
    throw error
  }
}

/** Run `work` on every item, at most `width` at a time. */
export async function concurrently(items, width, work) {
  let next = 0
  const lane = async () => {
    while (next < items.length) await work(items[next++])
  }
  await Promise.all(Array.from({ length: Math.min(width, items.length) }, lane))
}

export function batches(items, size) {
  return Array.from({ length: Math.ceil(items.length / size) }, (_, at) => items.slice(at * size, (at + 1) * size))
}

/** Every delivery once; what a peer needs whose bulk call refuses a key that occurs twice in it. */
export function distinct(deliveries) {
  return [...new Map(deliveries.map((delivery) => [delivery.id, delivery])).values()]
}

const PATIENCE_MS = 60_000
let gaveUp = false

/** Wait until `idle` says so, looking every 5 ms; a minute at most: what is not done by then is counted as lost. */
export async function until(idle) {
  const deadline = performance.now() + PATIENCE_MS
  gaveUp = false
  while (!(await idle())) {
    if (performance.now() > deadline) {
      gaveUp = true
      return
    }
    await new Promise((resolve) => setTimeout(resolve, 5))
  }
}

/**
 * Each line on stdin names a file of deliveries: ingest it, process it, and answer with what that took.
 *
 * @param ingest stores the deliveries, as a broker's client hands them over
 * Processing is timed from the first message that a handler gets: no worker's start is.
 *
 * @param process runs everything stored, and resolves when the last effect and completion are committed;
 *   may return what stops its worker, which is not timed
 */
export async function drive({ ingest, process: run, close }) {
  console.log('ready')
  for await (const path of createInterface({ input: process.stdin })) {
    const deliveries = readFileSync(path, 'utf8').trim().split('\n').map(JSON.parse)
    const cpu = process.cpuUsage()
    const began = performance.now()
    await ingest(deliveries)
    const ingested = performance.now()
    first = null
    const after = await run(deliveries)
    const done = performance.now()
    const { user, system } = process.cpuUsage(cpu)
    await after?.()
    console.log(JSON.stringify({
      ingest_s: (ingested - began) / 1e3,
      process_s: (done - (first ?? ingested)) / 1e3,
      cpu_s: (user + system) / 1e6,
      gave_up: Number(gaveUp),
    }))
  }
  await close?.()
  process.exit(0)
}
