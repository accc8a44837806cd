// What `txbox conformance` talks to: one JSON object a line in, one out. The handlers do what the kit asks for.
import { createInterface } from "node:readline";
import pg from "pg";
import { Inbox, checkTables, stage } from "./inbox.mjs";

const pool = new pg.Pool({ connectionString: process.env.TXBOX_DATABASE_URL });
pool.on("error", () => {}); // an idle connection was lost: the pool makes another
const say = (answer) => process.stdout.write(JSON.stringify(answer) + "\n");
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const bytes = (text) => (text === null ? null : Buffer.from(text, "base64"));

const EFFECT = "INSERT INTO conformance_effect (consumer, message_id, writer, follows) VALUES ($1, $2, 'program', $3)";

const handler = (command) => async (message, tx) => {
  const kind = command.handler;
  if (kind === "leave" || kind === "escape") await tx.query("ROLLBACK");
  if (kind === "leave") await tx.query("BEGIN");
  await tx.query(EFFECT, [message.consumer, message.id, kind === "orphan" ? -1 : null]);
  if (command.stage) await stage(tx, message, { ...command.stage, payload: bytes(command.stage.payload) });
  if (kind === "fail" || kind === "escape") throw new RangeError("the handler fails");
  if (kind === "swallow") await tx.query("SELECT 1/0").catch(() => {});
  if (kind === "commit") await tx.query("COMMIT");
};

const verbs = {
  deliver: async (inbox, { id, topic, payload, type, key, ...command }) => ({
    outcome: await inbox.deliver({ id, topic, type, key, payload: bytes(payload) }, handler(command)),
  }),
  lease: async (inbox, { limit, lease_s }) => {
    const { token, messages } = await inbox.lease(limit, lease_s);
    return { token, ids: messages.map((message) => message.id) };
  },
  heartbeat: async (inbox, { token, ids, lease_s }) => ({ extended: await inbox.heartbeat(token, ids, lease_s) }),
  finish: async (inbox, { token, id, consumer, ...command }) => ({
    outcome: await inbox.finish(token, { id, consumer }, handler(command)),
  }),
};

await checkTables(pool);
say({ contract: 1 });
for await (const line of lines) {
  const { do: verb, consumer, max_attempts, retry_s, lock_timeout_ms, pause, ...rest } = JSON.parse(line);
  const at = async (point) => {
    if (point !== pause) return;
    say({ at: point });
    await lines.next();
  };
  const options = { maxAttempts: max_attempts, retryS: retry_s, lockTimeoutMs: lock_timeout_ms, at };
  say(await verbs[verb](new Inbox(pool, consumer, options), { consumer, ...rest }));
}
await pool.end();
