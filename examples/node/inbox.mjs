// The inbox and outbox of txbox for Node, as docs/contract.md says. The numbers in the comments are its sentences.
import { createHash, randomUUID } from "node:crypto";

const IN_PROGRESS = "in_progress";
const FINISHED = ["processed", "dead", "discarded"];

const ARM = `SELECT set_config('txbox.token', $1, true), set_config('idle_in_transaction_session_timeout', '60s', true),
                    set_config('txbox.lock_timeout', current_setting('lock_timeout'), true),
                    set_config('lock_timeout', $2::text, true)`;
const CLAIM = `INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, processed_at, payload_hash)
               VALUES ($1, $2, 'processed', $3, $4, $5, now(), $6)
               ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING RETURNING message_id`;
const FENCE = `UPDATE txbox_inbox
                  SET status = 'processed', processed_at = now(), updated_at = now(), starts = greatest(starts - 1, 0),
                      token = NULL, lease_until = NULL, next_attempt_at = NULL, error_type = NULL, error = NULL,
                      fingerprint = NULL, content_type = NULL, headers = NULL, origin = NULL, payload = NULL,
                      has_payload = false
                WHERE consumer = $1 AND message_id = $2 AND token = $3 AND status = 'processing'
            RETURNING message_id`;
const FLUSH = `CASE WHEN current_setting('synchronous_commit') IN ('off', 'local', 'remote_write')
                    THEN set_config('synchronous_commit', 'on', true) END`;
const CLOSE = `SELECT CASE WHEN current_setting('txbox.token', true) = $1::text
                           THEN set_config('txbox.closed', $1::text, true) ELSE txbox_refuse() END, ${FLUSH}`;
const CLASSIFY = `SELECT status, payload_hash, has_payload FROM txbox_inbox WHERE consumer = $1 AND message_id = $2`;
const QUARANTINE = `INSERT INTO txbox_quarantine AS aside (consumer, message_id, hash, reason, topic, type, key, payload,
                                                           kept_bytes)
                    VALUES ($1, $2, $3, 'another payload under a known id', $4, $5, $6, $7::bytea,
                            coalesce(length($7::bytea), 0))
                    ON CONFLICT ON CONSTRAINT txbox_quarantine_pkey DO UPDATE
                    SET seen = aside.seen + 1, updated_at = now(),
                        status = CASE aside.status WHEN 'replaced' THEN 'quarantined' ELSE aside.status END
                    RETURNING ${FLUSH}`;
const PARK = `INSERT INTO txbox_inbox (consumer, message_id, status, topic, type, key, payload_hash, attempts,
                                       next_attempt_at, error_type, error, fingerprint, payload, has_payload)
              VALUES ($1, $2, CASE WHEN $3::boolean OR $4::integer <= 1 THEN 'dead' ELSE 'failed' END, $8, $9, $10, $11, 1,
                      clock_timestamp() + make_interval(secs => $5::double precision), $6, $7, $6, $12, true)
              ON CONFLICT ON CONSTRAINT txbox_inbox_pkey DO NOTHING RETURNING status, attempts`;
const PARK_LEASED = `UPDATE txbox_inbox
                        SET status = CASE WHEN $3::boolean OR attempts + 1 >= $4::integer THEN 'dead' ELSE 'failed' END,
                            attempts = attempts + 1, starts = greatest(starts - 1, 0), token = NULL, lease_until = NULL,
                            next_attempt_at = clock_timestamp() + make_interval(secs => $5::double precision),
                            updated_at = clock_timestamp(), error_type = $6, error = $7, fingerprint = $6
                      WHERE consumer = $1 AND message_id = $2 AND token = $8 AND status = 'processing'
                  RETURNING status, attempts`;
const ATTEMPT = `INSERT INTO txbox_attempt (consumer, message_id, attempt, status, error_type, error, fingerprint)
                 VALUES ($1, $2, $3, $4, $5, $6, $5) RETURNING ${FLUSH}`;
const LEASE = (starts) => `WITH due AS MATERIALIZED (
                   SELECT message_id FROM txbox_inbox
                    WHERE consumer = $1 COLLATE "POSIX" AND status IN ('pending', 'failed') AND has_payload
                      AND starts ${starts} AND next_attempt_at <= statement_timestamp()
                      AND NOT EXISTS (SELECT 1 FROM txbox_pause WHERE txbox_pause.consumer = $1)
                    ORDER BY next_attempt_at, arrival LIMIT $3 FOR UPDATE SKIP LOCKED)
              UPDATE txbox_inbox AS inbox
                 SET status = 'processing', token = $2, starts = inbox.starts + 1, updated_at = clock_timestamp(),
                     lease_until = clock_timestamp() + make_interval(secs => $4::double precision)
                FROM due WHERE inbox.consumer = $1 AND inbox.message_id = due.message_id
           RETURNING inbox.message_id AS id, inbox.topic, inbox.type, inbox.key, inbox.payload`;
const HEARTBEAT = `UPDATE txbox_inbox AS inbox
                      SET lease_until = clock_timestamp() + make_interval(secs => $4::double precision)
                     FROM (SELECT message_id FROM txbox_inbox
                            WHERE consumer = $1 AND message_id = ANY($3::text[]) AND token = $2 AND status = 'processing'
                              FOR UPDATE SKIP LOCKED) AS leased
                    WHERE inbox.consumer = $1 AND inbox.message_id = leased.message_id`;
const STAGE = `INSERT INTO txbox_outbox (id, topic, type, key, content_type, headers, payload, cause_consumer, cause_id, route)
               VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)`;

const sha256 = (data) => createHash("sha256").update(data).digest();
const token = () => randomUUID().replaceAll("-", "");

/** The handler has left the transaction that claimed its message: what it wrote is unknown (3.4). */
class TransactionBroken extends Error {}

/** Neither the message nor its handler is to blame: it is delivered again, and no attempt counts (3.8, 3.11). */
const passing = (client, error) => client.lost || ["55P03", "40001", "40P01"].includes(error.code);

/** The id as it is stored (2.1, 2.2); null if it cannot be used (2.3). */
function storedId(id) {
  if (!id || id.includes("\0") || !id.isWellFormed()) return null;
  return Buffer.byteLength(id) > 255 || id.startsWith("sha256:") ? "sha256:" + sha256(id).toString("hex") : id;
}

/** Refuse tables that this code is too old for (1.1). */
export async function checkTables(pool) {
  const { rows } = await pool.query("SELECT compatible_from FROM txbox_schema ORDER BY version DESC LIMIT 1");
  if (!rows.length || rows[0].compatible_from > 1) throw new Error("the txbox tables are of another version");
}

/** Stage an outgoing message in the handler's transaction (6.1, 6.2); a relay of txbox sends it. */
export async function stage(tx, cause, { topic, payload, route, key = null, type = null, contentType = null }) {
  const headers = JSON.stringify([["causation-id", cause.id]]);
  await tx.query(STAGE, [randomUUID(), topic, type, key, contentType, headers, payload, cause.consumer, cause.id, route]);
}

/** The messages of one consumer. `at` is called at named points, for tests. */
export class Inbox {
  constructor(pool, consumer, { maxAttempts = 8, retryS = 30, lockTimeoutMs = 5000, at = async () => {} } = {}) {
    Object.assign(this, { pool, consumer, maxAttempts, retryS, lockTimeoutMs, at });
  }

  /** Process a delivery: acknowledge it for every answer but in_progress and refused. */
  async deliver({ id, topic, payload, type = null, key = null }, handler) {
    const stored = storedId(id);
    if (stored === null) return "refused";
    const hash = payload === null ? Buffer.alloc(32) : sha256(payload); // 2.4
    const message = { id: stored, consumer: this.consumer, topic, type, key, payload };
    return this.#attempt(message, handler, {
      claim: [CLAIM, [this.consumer, stored, topic, type, key, hash]],
      park: [PARK, [topic, type, key, hash, payload]],
      otherwise: () => this.#existing(message, hash),
    });
  }

  /** Lease due rows: those whose last run never ended one by one (5.1 to 5.4, 5.9). */
  async lease(limit, leaseS) {
    const lease = token();
    let { rows } = await this.pool.query(LEASE("= 0"), [this.consumer, lease, limit, leaseS]);
    if (!rows.length) ({ rows } = await this.pool.query(LEASE("> 0"), [this.consumer, lease, 1, leaseS]));
    return { token: lease, messages: rows.map((row) => ({ ...row, consumer: this.consumer })) };
  }

  /** Extend leases; returns how many were still ours (5.5). */
  async heartbeat(lease, ids, leaseS) {
    return (await this.pool.query(HEARTBEAT, [this.consumer, lease, ids, leaseS])).rowCount;
  }

  /** Run a leased message; "lost" if it is no longer ours (5.6 to 5.8). */
  async finish(lease, message, handler) {
    return this.#attempt(message, handler, {
      claim: [FENCE, [this.consumer, message.id, lease]],
      park: [PARK_LEASED, [lease]],
      otherwise: async () => "lost",
    });
  }

  async #attempt(message, handler, { claim, park, otherwise }) {
    const client = await this.pool.connect();
    client.lost = client.claimed = false;
    const onError = () => (client.lost = true);
    client.on("error", onError);
    let failure = null;
    try {
      if (!(await this.#transaction(client, message, handler, claim))) return await otherwise();
      return "processed";
    } catch (error) {
      if (passing(client, error)) return IN_PROGRESS;
      if (!client.claimed) throw error; // a statement of ours: nothing of the message has run
      failure = error;
    } finally {
      client.off("error", onError);
      client.release(client.lost || failure instanceof TransactionBroken);
    }
    await this.at("rolled_back");
    return (await this.#park(message, failure, park)) ?? otherwise();
  }

  /** BEGIN, claim, handler, close, COMMIT (3.1 to 3.6); false if there was nothing to claim. */
  async #transaction(client, message, handler, claim) {
    const guard = token();
    try {
      await client.query("BEGIN ISOLATION LEVEL READ COMMITTED");
      await client.query(ARM, [guard, this.lockTimeoutMs]);
      if (!(await client.query(...claim)).rowCount) {
        await client.query("ROLLBACK");
        return false;
      }
      await client.query("SELECT set_config('lock_timeout', current_setting('txbox.lock_timeout'), true)");
      await client.query("SAVEPOINT txbox_claim");
      client.claimed = true;
      await this.at("claimed");
      try {
        await handler(message, client);
        await this.at("handled");
        await client.query(CLOSE, [guard]);
      } catch (error) {
        if (error.code === "TXB01") throw new TransactionBroken("the handler left the transaction");
        if (error.code !== "TXB02" && !passing(client, error)) await this.#stillClaimed(client); // TXB02 has rolled back
        throw error;
      }
      await client.query("COMMIT"); // close would have failed in a failed transaction, which COMMIT only rolls back
    } catch (error) {
      await client.query("ROLLBACK").catch(() => (client.lost = true));
      throw error;
    }
    await this.at("committed");
    return true;
  }

  /** A failed transaction still knows its savepoints; one that the handler has begun does not know ours (3.4). */
  async #stillClaimed(client) {
    await client.query("ROLLBACK TO SAVEPOINT txbox_claim").catch((error) => {
      if (["3B001", "25P01"].includes(error.code)) throw new TransactionBroken("the handler left the transaction");
      client.lost = true;
      throw error;
    });
  }

  /** Record a failure and its attempt in one transaction (4.1 to 4.4); null if the row is not ours to write. */
  async #park(message, error, [sql, rest]) {
    const client = await this.pool.connect();
    const [name, text] = [error.constructor.name, String(error.message).slice(0, 8000)];
    try {
      await client.query("BEGIN ISOLATION LEVEL READ COMMITTED");
      const final = error instanceof TransactionBroken;
      // what must not run again waits for whoever has claimed it since
      if (!final) await client.query("SELECT set_config('lock_timeout', $1::text, true)", [this.lockTimeoutMs]);
      const known = [this.consumer, message.id, final, this.maxAttempts, this.retryS, name, text];
      const { rows } = await client.query(sql, [...known, ...rest]);
      if (rows.length) {
        const { status, attempts } = rows[0];
        await client.query(ATTEMPT, [this.consumer, message.id, attempts, status, name, text]);
      }
      await client.query("COMMIT");
      return rows.length ? rows[0].status : null;
    } catch (failed) {
      await client.query("ROLLBACK").catch(() => {});
      if (passing(client, failed)) return IN_PROGRESS;
      throw failed;
    } finally {
      client.release();
    }
  }

  /** What a row that is there already says of a delivery (3.7, 3.9, 3.10). */
  async #existing({ id, topic, type, key, payload }, hash) {
    const { rows } = await this.pool.query(CLASSIFY, [this.consumer, id]);
    if (!rows.length) return IN_PROGRESS; // pruned, or rolled back: deliver it again
    const [{ status, payload_hash: known, has_payload: waits }] = rows;
    if (known && !known.equals(hash)) {
      await this.pool.query(QUARANTINE, [this.consumer, id, hash, topic, type, key, payload]);
      return "quarantined";
    }
    if (FINISHED.includes(status)) return "duplicate";
    return waits ? "deferred" : IN_PROGRESS;
  }
}
