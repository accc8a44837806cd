"""The server and its tables: settings, durability, the guard, partitions, and what holds back vacuum."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

from txbox.admin import findings
from txbox.admin.doctor import Diagnosis, Finding
from txbox.admin.reader import Application, has_app
from txbox.errors import ConfigurationError, Fault, SchemaError, StoreError, StoreUnavailable
from txbox.session import Connection, Connections, Session
from txbox.store import partitions, schema
from txbox.store.dialect import Dialect
from txbox.store.dialect import dialect as load_dialect
from txbox.text import capitalized, counted, lasting

T = TypeVar("T")

_SKEW_S = 2.0
_LAG_S = 60.0
_LAG_BYTES = 256 * 1024 * 1024
# beyond both, a table is more garbage than a vacuum that keeps up leaves behind
_DEAD_ROWS = 50_000
_DEAD_SHARE = 0.2
_NAMED = 5
_POOLER_LOOKS = 5


@dataclass(slots=True)
class Examination(findings.Examination):
    """One database that is examined.

    Args:
        usable: the tables are there, and of a version that this release works with.
        settings: those of the server that matter, by their names.
        session: those that statements rely on; see `schema.unfit`.
    """

    diagnosis: Diagnosis
    usable: bool = False
    settings: dict[str, str] = field(default_factory=dict[str, str])
    session: dict[str, str] = field(default_factory=dict[str, str])

    async def read(self, operation: Callable[[Session, Dialect], Awaitable[T]]) -> T | None:
        """Read in a transaction of its own; None where a table, column or function is missing."""
        await self.db.begin()
        try:
            result = await operation(self.db, self.dialect)
        except StoreError as error:
            if error.fault is not Fault.SCHEMA:
                raise
            await self.db.rollback()
            return None
        await self.db.commit()
        return result


async def tables(case: Examination) -> AsyncIterator[Finding]:
    """The session, the version of the tables, and all that belongs to it."""
    case.session = await case.read(schema.session_settings) or {}
    for name, refusal in schema.unfit(case.session).items():
        hides = name == "row_security"
        yield _refused(refusal, "row-security" if hides else "session-setting")
        if hides:
            return
    state = await case.read(schema.read_state) or schema.SchemaState(None, None, None)
    if unusable := schema.unusable(state):
        yield _refused(unusable, "schema-missing" if state.version is None else "schema-version")
        return
    case.usable = True
    if state.schema is not None:
        case.dialect = load_dialect(case.dialect.name, state.schema)
    version = state.version or 0
    if version < schema.VERSION:
        yield Finding(
            "schema-behind",
            f"The txbox tables are at version {version}, this release knows {schema.VERSION}.",
            "`txbox schema apply`.",
        )
    async for finding in _drift(case, version):
        yield finding
    async for finding in _guard(case, state):
        yield finding


def _refused(refusal: SchemaError | ConfigurationError, code: str) -> Finding:
    """Return the finding for the error with which txbox refuses to start."""
    return Finding(code, f"{refusal.problem}.", capitalized(refusal.remedy))


async def _drift(case: Examination, version: int) -> AsyncIterator[Finding]:
    wanted = schema.expected(case.dialect.name, min(version, schema.VERSION))
    await case.db.begin()
    actual, invalid = await schema.catalogue(case.db, case.dialect)
    await case.db.commit()
    print_it = f"Restore it: `txbox schema print --dialect {case.dialect.name}` has its SQL."
    if lacking := schema.missing(wanted, actual):
        # every later statement would fail on the same missing table or column
        case.usable = not any(part.startswith(("table", "column")) for part in lacking)
        problem = f"The tables are recorded as version {version}, but lack {_named(lacking)}."
        yield Finding("schema-drift", problem, print_it)
    for table, index in invalid:
        yield Finding(
            "index-invalid",
            f"The index {index} of {table} is not valid: building it was cut short, and nothing uses it.",
            f"`REINDEX INDEX CONCURRENTLY {index}`.",
        )
    if other := schema.changed(wanted, actual):
        problem = f"The text of {_named(other)} is not that of version {version}: the guard may let half a message in."
        yield Finding("guard-changed", problem, print_it)


async def _guard(case: Examination, state: schema.SchemaState) -> AsyncIterator[Finding]:
    # None: something is missing, which is named already
    if await case.read(partial(schema.guarded, state=state)) is False:
        yield Finding(
            "guard-off",
            "The transaction guard does not fire: a handler that commits by itself leaves half a message.",
            _GUARDS[case.dialect.name],
        )


_GUARDS: Final = {
    "postgresql": "`ALTER TABLE txbox_inbox ENABLE ALWAYS TRIGGER txbox_inbox_guard`, on each partition as well, and "
    "`SET session_replication_role = origin` for the role of the workers.",
    "mysql": "`ALTER TABLE txbox_inbox ENGINE = InnoDB`.",
    "sqlite": "`PRAGMA foreign_keys = ON` on every connection, and txbox_guard as `txbox schema print` has it.",
}  # fmt: skip


async def creators(case: Examination) -> AsyncIterator[Finding]:
    """Who else may create in the schema of the tables."""
    if roles := await schema.creators(case.db, case.dialect):
        yield Finding(
            "foreign-create",
            f"{', '.join(roles)} may create in the schema of the txbox tables, and so have code run by whoever uses "
            "them.",
            f"`REVOKE CREATE ON SCHEMA … FROM {', '.join(roles)}`, or keep the tables in a schema of their own.",
        )


async def partitioned(case: Examination) -> AsyncIterator[Finding]:
    """Partitions must be made ahead: later ones than the last go to the default one, which only batches prune."""
    layout = await partitions.layout(case.db, case.dialect)
    ready = layout.ready_until
    if ready is not None and partitions.missing(layout, case.app.retention.partition, 1):
        yield Finding(
            "partitions-missing",
            f"The partitions of the inbox end at {partitions.moment(ready.timestamp())}, and it is "
            f"{partitions.moment(layout.clock_s)}: later messages go to the default partition.",
            "Have `txbox run` or `txbox maintain` running.",
        )


# -- settings ---------------------------------------------------------------------------------


async def settings(case: Examination) -> AsyncIterator[Finding]:
    """What the server is set to, as a transaction of txbox's sees it."""
    (result,) = await case.db.together((case.statement("doctor_settings"),))
    case.settings = {str(name): str(value) for name, value in result.rows}
    for part in (_writable, _encodings, _isolation, _durability, _time_outs):
        for finding in part(case):
            yield finding


def _encodings(case: Examination) -> Iterator[Finding]:
    encoding, of_role = (
        case.session.get("server_encoding", "UTF8"),
        case.settings.get("role_encoding"),
    )
    if encoding == "SQL_ASCII":
        yield Finding(
            "server-encoding",
            "The database's encoding is SQL_ASCII: it keeps whatever bytes each client sends, and another client may "
            "send an id in other bytes than txbox, which sends UTF-8.",
            "Have all clients use client_encoding = UTF8, or move to a database in UTF8.",
        )
    elif encoding != "UTF8":
        yield Finding(
            "server-encoding",
            f"The database's encoding is {encoding}: messages whose id, topic, type or key has other characters go to "
            "the quarantine.",
            "Move to a database in UTF8.",
        )
    if of_role is not None and of_role.upper().replace("-", "") != "UTF8":
        yield Finding(
            "role-encoding",
            f"The role's client_encoding is {of_role}: txbox sets UTF8 where it connects itself, but refuses your "
            "pools, engines and connections that do not.",
            "`ALTER ROLE … SET client_encoding = 'UTF8'`, or of the database, wherever it is set.",
        )


def _writable(case: Examination) -> Iterator[Finding]:
    if (
        case.settings.get("default_transaction_read_only") == "on"
        and case.settings.get("in_recovery") == "off"
    ):
        yield Finding(
            "on-replica",
            "default_transaction_read_only is on for this role or database: nothing can be processed.",
            "`ALTER ROLE … RESET default_transaction_read_only`, or of the database, wherever it is set.",
        )
        return
    for name in _READ_ONLY:
        if case.settings.get(name, "off").lower() not in ("off", "0"):
            yield Finding(
                "on-replica",
                f"{case.app.database.name} takes no writes ({name} is {case.settings[name]}): who has processed what "
                "is decided on the primary only.",
                "Give the App the URL of the primary.",
            )
            return


_READ_ONLY: Final = (
    "in_recovery", "transaction_read_only", "super_read_only", "read_only", "innodb_read_only",
)  # fmt: skip


def _isolation(case: Examination) -> Iterator[Finding]:
    level = case.settings.get("transaction_isolation") or case.settings.get("tx_isolation")
    default = case.settings.get("default_transaction_isolation", "read committed")
    if level is not None and level.lower().replace("-", " ") != "read committed":
        yield Finding(
            "isolation-level",
            f"The transactions of txbox run at {level.upper()} instead of READ COMMITTED: a rival's commit is a "
            "serialization failure.",
            "Leave the isolation level of the pool or engine of App() at READ COMMITTED.",
        )
    elif default != "read committed":
        yield Finding(
            "isolation-level",
            f"default_transaction_isolation is {default}: the transactions of txbox are READ COMMITTED all the same, "
            "but one that you begin for Inbox.accept meets a rival's commit as a serialization failure.",
            "`ALTER ROLE … SET default_transaction_isolation = 'read committed'`, or try again at SQLSTATE 40001.",
        )


def _durability(case: Examination) -> Iterator[Finding]:
    for name, bad, code, so, remedy in _DURABLE:
        value = case.settings.get(name, "").lower()
        # a log that is not written need not be flushed
        if value in bad and (name != "sync_binlog" or case.settings.get("log_bin") == "ON"):
            yield Finding(code, f"{name} is {value}: {so}.", remedy)


_LOST = "what was acknowledged to a broker can be lost with the machine"
_TORN = "a page that was half written when the machine went down stays damaged"
#: Setting, values that are wrong, code, what that means, what mends it.
_DURABLE: Final = (
    (
        "fsync", ("off",), "durability-fsync", f"{_LOST}, and the database be damaged",
        "`ALTER SYSTEM SET fsync = on`, and reload.",
    ),
    (
        "full_page_writes", ("off",), "durability-torn-pages", _TORN,
        "`ALTER SYSTEM SET full_page_writes = on`, and reload.",
    ),
    (
        "synchronous_commit", ("off",), "durability-commit",
        "txbox waits for the disk before it acknowledges all the same, your own transactions are lost with the server",
        "`ALTER ROLE … SET synchronous_commit = on`.",
    ),
    (
        "innodb_doublewrite", ("off", "detect_only"), "durability-torn-pages", _TORN,
        "Set innodb_doublewrite = ON, and restart.",
    ),
    (
        "innodb_flush_log_at_trx_commit", ("0", "2"), "durability-flush", _LOST,
        "`SET GLOBAL innodb_flush_log_at_trx_commit = 1`, and in the server's configuration.",
    ),
    (
        "sync_binlog", ("0",), "durability-flush", f"{_LOST}, on a replica that is promoted",
        "`SET GLOBAL sync_binlog = 1`, and in the server's configuration.",
    ),
    (
        "synchronous", ("0", "1"), "durability-flush", _LOST,
        "`PRAGMA synchronous = FULL` on every connection of the engine.",
    ),
    (
        "journal_mode", ("off", "memory"), "durability-journal", "a crash in a transaction damages the file",
        "`PRAGMA journal_mode = WAL`.",
    ),
)  # fmt: skip


def _time_outs(case: Examination) -> Iterator[Finding]:
    claim_s, longest_s = case.app.limits.lock_timeout.total_seconds(), _longest_s(case)
    lease_s = case.app.lease.duration.total_seconds()
    for name, unit_s in _OF_STATEMENTS.items():
        if 0 < (set_s := float(case.settings.get(name, 0)) * unit_s) <= claim_s:
            yield Finding(
                "time-out-statement",
                f"{name} is {lasting(set_s)} and Limits.lock_timeout {lasting(claim_s)}: a claim that waits for a "
                "rival is ended by the server, and taken for a database in trouble.",
                "Set it longer for the role of the workers, or make Limits.lock_timeout shorter.",
            )
    for name, unit_s in _OF_TRANSACTIONS.items():
        if 0 < (set_s := float(case.settings.get(name, 0)) * unit_s) <= longest_s:
            yield Finding(
                "time-out-transaction",
                f"{name} is {lasting(set_s)} and a run may take {lasting(longest_s)} (timeout= of the handlers, else "
                "Lease.duration): the server ends its transaction first.",
                "Set it longer for the role of the workers, or give the handlers a shorter timeout=.",
            )
    waits_s = float(case.settings.get("innodb_lock_wait_timeout", 0))
    if waits_s >= lease_s:
        yield Finding(
            "time-out-lock-wait",
            f"innodb_lock_wait_timeout is {lasting(waits_s)} and Lease.duration {lasting(lease_s)}: a handler that "
            "waits for a lock outlasts its lease.",
            "Set innodb_lock_wait_timeout below the lease.",
        )


# in which unit the server gives them
_OF_STATEMENTS: Final = {"statement_timeout": 0.001, "max_statement_time": 1.0}
_OF_TRANSACTIONS: Final = {
    "transaction_timeout": 0.001,
    "idle_transaction_timeout": 1.0,
    "idle_write_transaction_timeout": 1.0,
    "wait_timeout": 1.0,
}


def _longest_s(case: Examination) -> float:
    """The longest that a run may take."""
    bounds = [handler.options.timeout or case.app.lease.duration for handler in case.app.handlers]
    return max(bounds, default=case.app.lease.duration).total_seconds()


# -- what is between, beside and behind the server --------------------------------------------


async def clock(case: Examination) -> AsyncIterator[Finding]:
    """The database's clock decides over leases and retries; this machine's goes into new ids and signatures."""
    before = time.time()
    (row,) = await case.rows("doctor_clock")
    after = time.time()
    skew_s = float(row[0]) - (before + after) / 2
    if abs(skew_s) - (after - before) / 2 > _SKEW_S:
        yield Finding(
            "clock-skew",
            f"The clock of this machine is {lasting(abs(skew_s))} {'behind' if skew_s > 0 else 'ahead of'} the "
            "database's: leases and retries go by the database's, but ids that are made here, the age of webhook "
            "signatures and logs do not.",
            "Have both synchronised by NTP.",
        )


async def pooler(case: Examination) -> AsyncIterator[Finding]:
    """Two clients share one server connection: there is a transaction pooler between."""
    database = case.app.database
    connections = database.asynchronous if case.db.is_async else database.sync
    assert connections is not None, "the session came from it"
    try:
        async with _lent(connections) as first, _lent(connections) as second:
            shared, mixed = await _shared(case, first, second)
    except StoreUnavailable as error:
        case.diagnosis.not_checked(
            "whether a pooler is between", f"this needs two connections at a time: {error}"
        )
        return
    if not shared:
        return
    if mixed:
        yield Finding(
            "pooler-prepared",
            "A pooler gives out connections by transaction and knows no prepared statements: those of one client "
            "meet another's, or are missing.",
            "`?prepare=off` in the URL, or PgBouncer 1.21 with max_prepared_statements (docs/howto/pgbouncer.md).",
        )
    yield Finding(
        "pooler-transaction",
        "A pooler gives out connections by transaction: session settings, LISTEN and advisory locks of a session do "
        "not hold, and prepared statements only where it knows them.",
        "Nothing of txbox needs them; docs/howto/pgbouncer.md says what your own code must not use.",
    )
    if case.app.notify:
        yield Finding(
            "pooler-listen",
            "App(notify=True) wakes relays by LISTEN, which hears nothing through this pooler: they look once a poll.",
            "Give the App of the relay a URL past the pooler, or leave notify=True out.",
        )


@asynccontextmanager
async def _lent(connections: Connections) -> AsyncGenerator[Connection]:
    connection = await connections.acquire()
    try:
        yield connection
    finally:
        await connections.release(connection)


async def _shared(case: Examination, first: Connection, second: Connection) -> tuple[bool, bool]:
    """Whether both are on the same connection of the server's, and whether it has plans under the clients' names.

    Raises:
        StoreUnavailable: both are the same one of ours.
    """
    if first.native is second.native:
        # Django's, which has one a thread
        raise StoreUnavailable("this database has one.")
    statement = case.statement("doctor_backend")
    seen: tuple[set[int], set[int]] = (set(), set())
    mixed = False
    for _ in range(_POOLER_LOOKS):
        for connection, known in zip((first, second), seen, strict=True):
            ((backend, plans),) = (await connection.alone(statement)).rows
            known.add(int(backend))
            mixed = mixed or bool(plans)
        if seen[0] & seen[1]:
            return True, mixed
    return False, False


async def transactions_refused(case: Examination) -> Finding | None:
    """The finding when BEGIN failed because a pooler forwards single statements only; None for another failure."""
    if not case.dialect.has("doctor_backend"):
        return None
    try:
        await case.rows("doctor_backend")
    except StoreError:
        # not even a single statement
        case.db.discard()
        return None
    try:
        await case.db.begin()
    except StoreError:
        case.db.discard()
    else:
        # it was away for a moment
        await case.db.commit()
        return None
    return Finding(
        "pooler-statement",
        "A pooler gives out connections by statement, and refuses transactions: nothing of txbox can work.",
        "`pool_mode = transaction` in pgbouncer.ini, or a URL past the pooler.",
    )


async def standbys(case: Examination) -> AsyncIterator[Finding]:
    """Standbys that are far behind, or that a commit does not wait for."""
    rows = await case.rows("doctor_standbys")
    for name, lag_s, lag_bytes, _ in rows:
        if float(lag_s) > _LAG_S or int(lag_bytes or 0) > _LAG_BYTES:
            yield Finding(
                "replication-lag",
                f"The standby {name!r} is {lasting(float(lag_s))} and {int(lag_bytes or 0) / 1e6:,.0f} MB behind: a "
                "failover to it loses what was acknowledged meanwhile.",
                "`SELECT * FROM pg_stat_replication` shows where it hangs.",
            )
    if rows and not case.settings.get("synchronous_standby_names", "?"):
        yield Finding(
            "replication-asynchronous",
            f"No commit waits for a standby, of which there are {len(rows)} (synchronous_standby_names is empty): a "
            "failover loses what was acknowledged last.",
            "Set synchronous_standby_names, or use Kafka(anchored=True), which reads again what was lost.",
        )


async def storage(case: Examination) -> AsyncIterator[Finding]:
    """Tables that are not vacuumed, or not fast enough."""
    rows = await case.rows("doctor_storage")
    for name in ("autovacuum", "track_counts"):
        if case.settings.get(name) == "off":
            yield Finding(
                "autovacuum-off",
                f"{name} is off on the server: no table is vacuumed, and the outbox grows with each message.",
                f"`ALTER SYSTEM SET {name} = on`, and reload.",
            )
    off = [str(name) for name, _, _, vacuumed, _ in rows if not vacuumed]
    if off:
        yield Finding(
            "autovacuum-off",
            f"autovacuum_enabled is off for {_named(off)}: what is pruned or sent keeps its space.",
            f"`ALTER TABLE {off[0]} RESET (autovacuum_enabled)`.",
        )
    for name, live, dead, _, ago_s in rows:
        if dead > _DEAD_ROWS and dead > _DEAD_SHARE * (live + dead):
            last = "never" if ago_s is None else f"{lasting(float(ago_s))} ago"
            yield Finding(
                "dead-tuples",
                f"{name} has about {dead:,} dead rows beside {live:,} live ones, and was vacuumed {last}.",
                f"`VACUUM (ANALYZE) {name}`; an old transaction or a replication slot may hold it back.",
            )


async def transactions(case: Examination) -> AsyncIterator[Finding]:
    """A transaction that is older than any run may be holds back vacuum and purge."""
    rows = await case.rows("doctor_transactions")
    lease_s = case.app.lease.duration.total_seconds()
    for kind, name, who, state, age_s in rows:
        if kind == "blind":
            case.diagnosis.not_checked(
                "transactions of other roles",
                f"the role {who} does not see them: GRANT pg_read_all_stats TO {who}.",
            )
        elif float(age_s) > lease_s:
            what, end = f"session {name} of {who}", _END.get(case.dialect.name, "").format(name)
            if kind == "prepared":
                what, end = f"prepared transaction {name}", f"ROLLBACK PREPARED '{name}'"
            yield Finding(
                "old-transaction",
                f"The transaction of {what} ({state}) has been open for {lasting(float(age_s))}, longer than a run may "
                f"take ({lasting(lease_s)}): rows that have died since then cannot be removed.",
                f"End it where it was begun, or `{end}`.",
            )


_END: Final = {"postgresql": "SELECT pg_terminate_backend({})", "mysql": "KILL {}"}


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


# -- what a codec encodes ---------------------------------------------------------------------

_KEYS_OF = 1_000


async def encrypted(case: Examination) -> AsyncIterator[Finding]:
    """Payloads that the App's codec refuses, as they are plain, or cannot read, as it lacks their key."""
    codec = case.app.store.columns.codec
    if codec is None and not has_app(case.app):
        return
    keys: dict[str | None, Counter[str]] = defaultdict(Counter)
    consumer = ""
    while rows := await case.rows("explain_consumers", after=consumer, limit=1):
        consumer = rows[0][0]
        for key_id, count in await case.rows("doctor_keys", consumer=consumer, limit=_KEYS_OF):
            keys[key_id]["inbox"] += int(count)
    for table, key_id, count in await case.rows("doctor_keys_beside", limit=_KEYS_OF):
        keys[key_id][table] += int(count)
    if codec is not None and (plain := keys.pop(None, None)):
        yield Finding(
            "plain-rows",
            f"App(codec=…) encrypts, and there are plain payloads: {_rows_of(plain)}.",
            '`txbox encrypt` encrypts them; until then only App(plain="accept") reads them. If all were encrypted '
            "before, somebody else has written them.",
        )
    known = () if codec is None else getattr(codec, "key_ids", None)
    for key_id, tables in keys.items():
        if key_id is not None and known is not None and key_id not in known:
            have = f"App(codec=…) has {', '.join(known)}" if known else "this App has no codec="
            yield Finding(
                "key-missing",
                f"{_rows_of(tables)} encrypted with the key {key_id}, and {have}.",
                "Give the codec this key behind the others; then `txbox encrypt` makes it superfluous.",
            )


def _rows_of(tables: Counter[str]) -> str:
    """Counts up to the limit of each query: at least so many."""
    return ", ".join(
        f"{'at least ' if count >= _KEYS_OF else ''}{counted(count, 'row')} of txbox_{table}"
        for table, count in sorted(tables.items())
    )


# -- what keeps the tables small --------------------------------------------------------------

_PRUNED_WITHIN_S = 86_400.0


async def pruning(case: Examination) -> AsyncIterator[Finding]:
    """Whether rows are pruned."""
    known = {str(what): float(value) for what, value in await case.rows("doctor_pruning")}
    every_s, ran_s = case.app.retention.every.total_seconds(), known.get("ran", math.inf)
    within_s = max(_PRUNED_WITHIN_S, 4 * every_s)
    if not known["rows"] or min(known["tables"], ran_s) <= within_s:
        return
    last = "has never run" if math.isinf(ran_s) else f"ran {lasting(ran_s)} ago"
    yield Finding(
        "pruning-stopped",
        f"Pruning {last}, and is due every {lasting(every_s)}: the tables grow without bound.",
        "Have `txbox run` or `txbox maintain` running, or `txbox prune` once.",
    )


# -- all of it --------------------------------------------------------------------------------

#: What is examined, a query that not every database has, and the check.
Check = tuple[str, str | None, Callable[[Examination], AsyncIterator[Finding]]]

_OF_SERVER: tuple[Check, ...] = (
    ("the pooler", "doctor_backend", pooler),
    ("the server's settings", None, settings),
    ("the clock", "doctor_clock", clock),
    ("standbys", "doctor_standbys", standbys),
    ("old transactions", "doctor_transactions", transactions),
)
_OF_TABLES: tuple[Check, ...] = (
    ("who may create in the schema", "schema_creators", creators),
    ("dead rows and autovacuum", "doctor_storage", storage),
    ("partitions", "partitions", partitioned),
    ("what is encrypted", None, encrypted),
    *((what, None, part) for what, part in findings.PARTS.items()),
    ("pruning", None, pruning),
)


async def examine(db: Session, app: Application, diagnosis: Diagnosis) -> None:
    """Examine the database, in small transactions that only read.

    Raises:
        StoreUnavailable: it does not answer.
    """
    case = Examination(db, app, app.database.dialect, diagnosis)
    try:
        await db.begin()
    except ConfigurationError as error:
        # a connection of the user's pool or engine
        diagnosis.findings.append(_refused(error, "session-setting"))
        diagnosis.not_checked("the database", "txbox refuses these connections")
        return
    except StoreError:
        db.discard()
        if finding := await transactions_refused(case):
            diagnosis.findings.append(finding)
            return
        raise
    await db.commit()
    await _check(case, ("the tables", None, tables))
    for check in (*_OF_SERVER, *(_OF_TABLES if case.usable else ())):
        await _check(case, check)
    if not case.usable:
        diagnosis.not_checked("rows, pruning and partitions", "the tables are not whole")
    elif not has_app(app):
        diagnosis.not_checked(
            "rows that no handler or relay takes",
            "no App was given (--app): handlers and routes are not known",
        )


async def _check(case: Examination, check: Check) -> None:
    what, query, examined = check
    if query is None or case.dialect.has(query):
        await findings.check(case, case.diagnosis, what, examined)
