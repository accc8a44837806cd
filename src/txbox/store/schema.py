"""The tables: versioned migrations, the check at start, privileges of each role, and what a database lacks."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from txbox.errors import ConfigurationError, Fault, SchemaError, StoreError
from txbox.session import Session, Statement, Transaction
from txbox.store import partitions
from txbox.store.dialect import Dialect, qualified
from txbox.store.dialect import dialect as load_dialect
from txbox.store.partitions import Partitioning

#: The schema version that this release writes, and the oldest one it still works with.
VERSION = 1
OLDEST_USABLE = 1

# the storage settings of the inbox: a partitioned one has PARTITION BY instead, and its partitions have them
_INBOX_STORAGE = re.compile(
    r"(?<=PRIMARY KEY \(consumer, message_id\)\n\) )WITH \(autovacuum[^;]*\)(?=;)"
)

_FILE = re.compile(r"(\d{4})_\w+\.sql")
# a dollar-quoted body, a string, a comment, or the semicolon that ends a statement
_PIECE = re.compile(r"\$(\w*)\$.*?\$\1\$|'(?:[^']|'')*'|--[^\n]*|;", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SchemaState:
    """What the database contains: the version, and the PostgreSQL schema of the tables.

    Attributes:
        version: None if there are no tables.
        compatible_from: the oldest version whose releases can work with them.
        encoding: see `limited_encoding`; read by `check` only.
    """

    version: int | None
    compatible_from: int | None
    schema: str | None
    encoding: str | None = None


def migration_text(
    dialect: Dialect,
    schema: str | None,
    after: int = 0,
    upto: int | None = None,
    *,
    partitioning: Partitioning | None = None,
) -> str:
    """Return the SQL that migrates from version `after` (0: no tables) to version `upto` (None: this release's).

    Raises:
        ConfigurationError: partitions for an existing table, or on a database without them.
    """
    texts = migrations(dialect.name, after, upto)
    if partitioning is not None:
        _check_partitions(dialect)
        if after or (upto is not None and upto < VERSION):
            raise ConfigurationError(
                "Partitioning is chosen when the tables are created, at this release's version: remove the option "
                "from an upgrade, or remove --from and --to."
            )
        by = "HASH (consumer, message_id)" if partitioning.kind == "hash" else "RANGE (message_id)"
        (storage,) = _INBOX_STORAGE.findall(texts[0])
        texts[0] = _INBOX_STORAGE.sub(f"PARTITION BY {by}", texts[0])
        name = "partition_hash.sql" if partitioning.kind == "hash" else "partition_time.sql"
        text = _folder(dialect.name).joinpath(name).read_text("utf-8")
        texts.append(_filled(text, partitioning, storage))
    text = "\n".join(texts)
    if schema is None:
        return text
    return f'CREATE SCHEMA IF NOT EXISTS "{schema}";\n\n{qualified(text, schema)}'


def migrations(dialect_name: str, after: int = 0, upto: int | None = None) -> list[str]:
    """Read the files of the migrations behind version `after`, up to version `upto` (None: this release's)."""
    upto = VERSION if upto is None else upto
    texts: list[str] = []
    for entry in sorted(_folder(dialect_name).iterdir(), key=lambda file: file.name):
        named = _FILE.fullmatch(entry.name)
        if named and after < int(named[1]) <= upto:
            texts.append(entry.read_text("utf-8"))
    return texts


def _folder(dialect_name: str) -> Traversable:
    return files("txbox.store").joinpath("migrations").joinpath(dialect_name)


def _check_partitions(dialect: Dialect) -> None:
    if not dialect.has("partitions"):
        raise ConfigurationError(
            "The inbox can be partitioned on PostgreSQL only: remove the option."
        )


def _filled(text: str, partitioning: Partitioning, storage: str) -> str:
    values = {
        "storage": storage,
        "ids": partitioning.kind,
        "length_s": f"{partitioning.length.total_seconds():.0f}",
        "ahead": str(partitioning.ahead),
    }
    for name, value in values.items():
        text = text.replace(f"[{name}]", value)
    return text


def split(text: str) -> list[str]:
    """Split SQL into statements, at semicolons outside strings, comments and function bodies."""
    statements: list[str] = []
    start = 0
    for piece in _PIECE.finditer(text):
        if piece[0] == ";":
            statements.append(text[start : piece.start()].strip())
            start = piece.end()
    statements.append(text[start:].strip())
    bare = (re.sub(r"^(?:\s*--[^\n]*\n?)+", "", statement).strip() for statement in statements)
    return [statement for statement in bare if statement]


async def read_state(db: Transaction, dialect: Dialect) -> SchemaState:
    """Read which version is applied, in an open transaction."""
    exists = await db.execute(dialect.statement("schema_exists"))
    if not exists.rows[0][0]:
        return SchemaState(None, None, None)
    result = await db.execute(dialect.statement("schema_version"))
    version, compatible_from = result.rows[0] if result.rows else (None, None)
    return SchemaState(version, compatible_from, exists.rows[0][1])


async def check(db: Session, dialect: Dialect) -> SchemaState:
    """Check that this release can work with the tables, in a transaction of its own.

    Raises:
        SchemaError: the tables are missing, too old or too new, the guard does not fire, or the session is not what
            the statements rely on.
    """
    await db.begin()
    try:
        state = await _checked(db, dialect)
    except SchemaError:
        await db.rollback()
        raise
    # it only read, and a test that crashes at "before:commit" means that of a message
    await db.rollback()
    return state


async def _checked(db: Transaction, dialect: Dialect) -> SchemaState:
    # first: behind row security there seem to be no tables
    settings = await check_session(db, dialect)
    try:
        state = await read_state(db, dialect)
    except StoreError as error:
        if error.fault is not Fault.SCHEMA:
            raise
        # dropped between the two statements
        state = SchemaState(None, None, None)
    if refusal := unusable(state):
        raise refusal
    try:
        fires = await guarded(db, dialect, state)
    except StoreError as error:
        if error.fault is not Fault.SCHEMA:
            raise
        raise incomplete(error) from None
    if not fires:
        raise SchemaError(
            "The transaction guard does not fire: the trigger txbox_inbox_guard must be enabled always and "
            "session_replication_role be origin (PostgreSQL), or the table txbox_inbox be InnoDB (MySQL); "
            "compare the tables with `txbox schema print`."
        )
    return replace(state, encoding=limited_encoding(settings))


# -- the session that statements run in --------------------------------------------------------


async def check_session(db: Transaction, dialect: Dialect) -> dict[str, str]:
    """Check the settings of the session, in an open transaction; returns them.

    Raises:
        SchemaError: names the first one that txbox cannot work with.
    """
    settings = await session_settings(db, dialect)
    for refusal in unfit(settings).values():
        raise refusal
    return settings


async def session_settings(db: Transaction, dialect: Dialect) -> dict[str, str]:
    """Read what `unfit` judges; nothing where there is nothing to judge."""
    if not dialect.has("session"):
        return {}
    result = await db.execute(dialect.statement("session"))
    settings = {str(name): "" if value is None else str(value) for name, value in result.rows}
    if settings.pop("vitess", ""):
        ((keyspace,),) = (await db.execute(dialect.statement("keyspace"))).rows
        # a connection to one shard has its name here, and cannot ask for the others
        if ":" not in str(keyspace):
            shards = (await db.execute(dialect.statement("keyspace_shards"))).rows
            beginning = str(keyspace).partition("@")[0] + "/"
            count = sum(str(name).startswith(beginning) for (name,) in shards)
            settings["keyspace_shards"] = str(count)
    return settings


def unfit(settings: Mapping[str, str]) -> dict[str, SchemaError]:
    """Why txbox's statements cannot work in such a session, each with what to do, by the name of the setting."""
    refusals: dict[str, SchemaError] = {}
    if tables := settings.get("row_security"):
        refusals["row_security"] = SchemaError(
            f"Row security decides which rows of {tables} this role sees, and so may hide messages",
            "`ALTER TABLE … DISABLE ROW LEVEL SECURITY` for these tables, or `ALTER ROLE … BYPASSRLS`.",
        )
    for name, (fits, remedy) in _FITS.items():
        value = settings.get(name)
        if value is not None and not fits(value):
            refusals[name] = SchemaError(f"{name} is {value or 'empty'}", f"{remedy}.")
    return refusals


def limited_encoding(settings: Mapping[str, str]) -> str | None:
    """Return Python's name of the database's encoding; None for one that has all characters of Unicode."""
    encoding = settings.get("server_encoding", "UTF8")
    if encoding in ("UTF8", "SQL_ASCII"):
        return None
    try:
        return codecs.lookup(encoding.replace("WIN", "cp").replace("KOI8", "koi8_")).name
    except LookupError:
        # that much of it is certain
        return "ascii"


def _is_utf8mb4(charset: str) -> bool:
    return charset == "utf8mb4"


_CHARSET: Final = (_is_utf8mb4, "connect with charset=utf8mb4, or ids become others")
#: Setting, which values txbox can work with, what to do about others.
_FITS: Final[Mapping[str, tuple[Callable[[str], bool], str]]] = {
    "client_encoding": (
        lambda encoding: encoding == "UTF8",
        "connect with client_encoding=UTF8, or ids become others",
    ),
    "array_nulls": (
        lambda on: on == "on",
        "`ALTER ROLE … RESET array_nulls`, or a missing type or key becomes the text NULL",
    ),
    "standard_conforming_strings": (
        lambda on: on == "on",
        "`ALTER ROLE … RESET standard_conforming_strings`, or patterns mean something else",
    ),
    "extra_float_digits": (
        lambda digits: int(digits) >= 0,
        "`ALTER ROLE … RESET extra_float_digits`, or times and ages are rounded",
    ),
    "character_set_client": _CHARSET,
    "character_set_connection": _CHARSET,
    "character_set_results": _CHARSET,
    "sql_mode": (
        lambda modes: {"ORACLE", "EMPTY_STRING_IS_NULL"}.isdisjoint(modes.split(",")),
        "remove ORACLE and EMPTY_STRING_IS_NULL for this connection, or statements mean something else",
    ),
    "sql_safe_updates": (
        lambda on: on in ("OFF", "0"),
        "`SET sql_safe_updates = 0` on each connection, or updates of many rows are refused",
    ),
    "sql_select_limit": (
        lambda rows: int(rows) > 2**32,
        "`SET sql_select_limit = DEFAULT` on each connection, or rows are missing from each result",
    ),
    "keyspace_shards": (
        lambda shards: int(shards) == 1,
        "have an App for each shard, `mysql://…/keyspace:-80`: what spans shards may commit in one of them only",
    ),
    "completion_type": (
        lambda kind: kind in ("NO_CHAIN", "0"),
        "`SET completion_type = 'NO_CHAIN'` on each connection, or each COMMIT begins a transaction or disconnects",
    ),
}


async def state_of(db: Session, dialect: Dialect) -> SchemaState:
    """`read_state` in a transaction of its own."""
    await db.begin()
    state = await read_state(db, dialect)
    await db.commit()
    return state


def unusable(state: SchemaState) -> SchemaError | None:
    """Why this release cannot work with the tables, with the command to run; None when it can."""
    if state.version is None:
        return SchemaError(
            "The txbox tables are missing",
            "run `txbox init`, or apply the output of `txbox schema print`.",
        )
    if state.version < OLDEST_USABLE:
        return SchemaError(
            f"The txbox tables are at version {state.version}, but this release needs {OLDEST_USABLE}",
            "run `txbox schema apply`.",
        )
    if state.version > VERSION and (state.compatible_from or state.version) > VERSION:
        return SchemaError(
            f"The txbox tables are at version {state.version}, which this release (version {VERSION}) cannot use",
            "upgrade txbox with `pip install -U txbox`.",
        )
    return None


async def guarded(db: Transaction, dialect: Dialect, state: SchemaState) -> bool:
    """Whether the guard fires, checked in an open transaction.

    Raises:
        StoreError: SCHEMA, if parts of it are missing.
    """
    if not dialect.has("guard_check"):
        return True
    qualified_dialect = (
        load_dialect(dialect.name, state.schema) if dialect.name == "postgresql" else dialect
    )
    triggers, role = (await db.execute(qualified_dialect.statement("guard_check"))).rows[0]
    return bool(triggers) and role == "origin"


def incomplete(error: StoreError) -> SchemaError:
    """Return the error for tables that lack something their recorded version has."""
    return SchemaError(
        f"A table, column or function of txbox is missing although its version is recorded ({error}): "
        "compare the tables with `txbox schema print`, and restore what was changed."
    )


async def apply(
    db: Session, dialect: Dialect, schema: str | None, partitioning: Partitioning | None = None
) -> tuple[int, int]:
    """Migrate the tables to this release's version; returns the versions before and after.

    Raises:
        ConfigurationError: the tables exist and are not partitioned as requested.
        StoreError: on MySQL, another caller did not get done within an hour.

    Guarantee: concurrent callers end up with one schema. Where DDL is transactional, a crash leaves the
    old version; elsewhere, running it again completes it.
    """
    if partitioning is not None:
        _check_partitions(dialect)
    await db.begin()
    try:
        versions = await migrate(db, dialect, schema, partitioning=partitioning)
    except (ConfigurationError, SchemaError):
        await db.rollback()
        raise
    await db.commit()
    return versions


async def migrate(
    db: Transaction,
    dialect: Dialect,
    schema: str | None,
    *,
    upto: int | None = None,
    partitioning: Partitioning | None = None,
) -> tuple[int, int]:
    """`apply` in the caller's transaction, up to a version; newer tables are not changed."""
    upto = VERSION if upto is None else upto
    await check_session(db, dialect)
    if dialect.has("schema_lock"):
        await _lock(db, dialect)
    state = await read_state(db, dialect)
    before = state.version or 0
    if before and partitioning is not None:
        existing = await partitions.read(db, dialect)
        if existing.kind != partitioning.kind:
            raise ConfigurationError(
                f"The inbox exists and is {_as_found(existing.kind)}: partitioning is chosen when the tables are "
                "created. See docs/howto/retention.md for a table with rows."
            )
        partitioning = None
    text = migration_text(dialect, schema, after=before, upto=upto, partitioning=partitioning)
    for number, sql in enumerate(split(text), 1):
        # migrations contain no parameters; the name is the crash point
        await db.execute(Statement(f"migration_{number}", sql, {}))
    if dialect.has("schema_unlock"):
        await db.execute(dialect.statement("schema_unlock"))
    return before, max(before, upto)


async def _lock(db: Transaction, dialect: Dialect) -> None:
    result = await db.execute(dialect.statement("schema_lock"))
    # a lock that outlives transactions answers 1; 0 when it was not free in time, NULL when the wait was ended
    if dialect.has("schema_unlock") and not result.rows[0][0]:
        raise StoreError(
            "Another process has been creating or upgrading the txbox tables all the time, and nothing was changed: "
            "run `txbox init` again when it is done.",
            fault=Fault.LOCK_TIMEOUT,
        )


def _as_found(kind: partitions.Kind | None) -> str:
    return "not partitioned" if kind is None else f"partitioned for {kind}"


async def creators(db: Session, dialect: Dialect) -> list[str]:
    """Name the roles that may create objects in the tables' schema, besides their owners and superusers.

    Each of them can define an operator or function that anyone who uses the tables would call.
    """
    if not dialect.has("schema_creators"):
        return []
    result = await dialect.run(db, "schema_creators")
    return [str(row[0]) for row in result.rows]


def grants(dialect: Dialect, kind: partitions.Kind | None = None) -> dict[str, str]:
    """Return the privileges each role needs, as SQL with a `<role>` placeholder; empty where roles do not exist.

    Args:
        kind: how the inbox is partitioned.
    """
    if dialect.name == "sqlite":
        return {}
    rights = _rights(mysql=dialect.name == "mysql", timed=kind in ("uuid7", "ulid"))
    return {
        role: "\n".join(f"GRANT {right} ON {table} TO <{role}>;" for right, table in pairs)
        for role, pairs in rights.items()
    }


def _rights(*, mysql: bool, timed: bool) -> dict[str, list[tuple[str, str]]]:
    # on PostgreSQL the database itself fills in the login and the time
    audited = "INSERT" if mysql else f"INSERT ({_AUDITED})"
    # pages start at the newest row, which PostgreSQL reads from the sequence because no index has it
    newest = () if mysql else _SEQUENCES
    return {
        "consumer": [
            ("SELECT, INSERT, UPDATE", "txbox_inbox"),
            ("SELECT, INSERT", "txbox_attempt"),
            ("SELECT, INSERT, UPDATE", "txbox_quarantine"),
            # MySQL rewrites an existing row instead of leaving it alone
            ("SELECT, INSERT, UPDATE" if mysql else "SELECT, INSERT", "txbox_outbox"),
            ("SELECT, INSERT, UPDATE", "txbox_sequence"),
            ("SELECT, INSERT, UPDATE", "txbox_job"),
            *_PULSE_RIGHTS,
            # a worker pauses a consumer after too many failures in a row
            ("SELECT, INSERT", "txbox_pause"),
            (audited, "txbox_audit"),
            ("SELECT", "txbox_schema"),
        ],
        "relay": [
            ("SELECT, UPDATE, DELETE", "txbox_outbox"),
            *_PULSE_RIGHTS,
            ("SELECT", "txbox_pause"),
            # the start-up check reads table metadata, which MySQL shows only to roles that may read the table
            *([("SELECT", "txbox_inbox")] if mysql else []),
            ("SELECT", "txbox_schema"),
        ],
        "maintenance": [
            ("SELECT, UPDATE, DELETE", "txbox_inbox"),
            ("SELECT, INSERT, DELETE", "txbox_attempt"),
            ("SELECT, UPDATE, DELETE", "txbox_quarantine"),
            # a rescued message that is dead may stage a dead letter, and what is resolved an alert
            ("SELECT, INSERT, UPDATE, DELETE", "txbox_outbox"),
            ("SELECT, INSERT, UPDATE, DELETE", "txbox_job"),
            # the review of alerts reads which messages only wait for another version
            ("SELECT", "txbox_sequence"),
            ("SELECT, INSERT, UPDATE, DELETE", "txbox_activity"),
            _PULSE_RIGHTS[1],
            ("SELECT", "txbox_pause"),
            ("SELECT", "txbox_schema"),
            *(_PARTITION_RIGHTS if timed else ()),
        ],
        "operator": [
            ("SELECT, INSERT, UPDATE", "txbox_inbox"),
            ("SELECT", "txbox_attempt"),
            ("SELECT, INSERT, UPDATE", "txbox_quarantine"),
            ("SELECT, UPDATE", "txbox_outbox"),
            ("SELECT", "txbox_sequence"),
            ("SELECT", "txbox_job"),
            ("SELECT, INSERT, DELETE", "txbox_pause"),
            ("SELECT", "txbox_activity"),
            ("SELECT", "txbox_worker"),
            (f"SELECT, {audited}", "txbox_audit"),
            ("SELECT", "txbox_dead_letters"),
            ("SELECT", "txbox_status"),
            ("SELECT", "txbox_schema"),
            *newest,
        ],
        "readonly": [*(("SELECT", table) for table in _READABLE), *newest],
        "viewer": [
            *((f"SELECT ({columns})", table) for table, columns in _WITHOUT_CONTENT.items()),
            *(("SELECT", table) for table in ("txbox_activity", "txbox_worker", "txbox_pause")),
            ("SELECT", "txbox_status"),
            ("SELECT", "txbox_schema"),
            *newest,
        ],
    }


_AUDITED = "actor, action, filter, affected, reason"

#: For a process's heartbeat and counts.
_PULSE_RIGHTS = (
    ("SELECT, INSERT, UPDATE", "txbox_activity"),
    ("SELECT, INSERT, UPDATE, DELETE", "txbox_worker"),
)

_SEQUENCES = (
    ("SELECT", "SEQUENCE txbox_inbox_arrival_seq"),
    ("SELECT", "SEQUENCE txbox_outbox_number_seq"),
)

_PARTITION_RIGHTS = (
    ("EXECUTE", "FUNCTION txbox_partition_make(timestamptz, timestamptz, integer)"),
    ("EXECUTE", "FUNCTION txbox_partition_detach(text, double precision)"),
    ("EXECUTE", "FUNCTION txbox_partition_drop(text, double precision)"),
)

#: The state of messages without their contents: no payload, headers, key, result or error text.
_WITHOUT_CONTENT = {
    "txbox_inbox": "consumer, message_id, status, topic, type, received_at, updated_at, processed_at, attempts, "
    "starts, next_attempt_at, lease_until, error_type, fingerprint, has_payload, arrival",
    "txbox_attempt": "number, consumer, message_id, attempt, status, error_type, fingerprint, recorded_at",
    "txbox_quarantine": "consumer, message_id, topic, type, seen, status, kept_bytes, received_at, updated_at",
    "txbox_outbox": "id, number, status, route, topic, type, staged_at, available_at, sent_at, attempts, token, "
    "error_type",
}

_READABLE = (
    "txbox_status",
    "txbox_dead_letters",
    "txbox_inbox",
    "txbox_attempt",
    "txbox_quarantine",
    "txbox_outbox",
    "txbox_sequence",
    "txbox_job",
    "txbox_activity",
    "txbox_worker",
    "txbox_pause",
    "txbox_schema",
)


# -- what the tables consist of ----------------------------------------------------------------

_COMMENT = re.compile(r"--[^\n]*")
# what creates, alters or drops something, in order
_STEP = re.compile(
    r"CREATE TABLE (?:IF NOT EXISTS )?(?P<table>txbox_\w+) \((?P<body>.*?)\n\)"
    r"|CREATE (?:OR REPLACE )?VIEW (?P<view>txbox_\w+)"
    r"|CREATE INDEX (?:IF NOT EXISTS )?(?P<index>txbox_\w+) ON (?P<indexed>txbox_\w+)"
    r"|DROP INDEX (?P<dropped>[^;']*)"
    r"|ALTER TABLE (?P<altered>txbox_\w+)\s(?P<changes>[^;]*)"
    r"|CREATE (?:OR REPLACE )?FUNCTION (?P<function>txbox_\w+)\(\)(?:(?!\$function\$).)*"
    r"\$function\$(?P<source>.*?)\$function\$",
    re.DOTALL,
)
_COLUMN = re.compile(r"^    (`?)([a-z_]+)\1 +[A-Za-z]", re.MULTILINE)
_KEY = re.compile(
    r"^    KEY (txbox_\w+)|^    (PRIMARY) KEY|CONSTRAINT (txbox_\w+_pkey) ", re.MULTILINE
)
_KEY_OF_COLUMN = re.compile(r"^    [a-z_]+ .*PRIMARY KEY", re.MULTILINE)
_CHANGE = re.compile(r"(ADD|DROP) (COLUMN|KEY) `?(\w+)`?")


@dataclass(slots=True)
class Catalogue:
    """The columns and indexes of each table (none for a view), and the source of each function."""

    columns: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    indexes: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    functions: dict[str, str] = field(default_factory=dict[str, str])


@cache
def expected(dialect_name: str, upto: int | None = None) -> Catalogue:
    """Return what the migrations up to a version (None: this release's) create, except for partitions."""
    text = _COMMENT.sub("", "\n".join(migrations(dialect_name, upto=upto)))
    wanted = Catalogue()
    for step in _STEP.finditer(text):
        if (table := step["table"]) is not None:
            body = step["body"]
            wanted.columns[table] = {name for _, name in _COLUMN.findall(body)}
            wanted.indexes[table] = {"".join(names) for names in _KEY.findall(body)}
            if _KEY_OF_COLUMN.search(body):
                wanted.indexes[table].add(f"{table}_pkey")
        elif step["view"] is not None:
            wanted.columns[step["view"]] = set()
        elif step["index"] is not None:
            wanted.indexes[step["indexed"]].add(step["index"])
        elif step["dropped"] is not None:
            for name in re.findall(r"txbox_\w+", step["dropped"]):
                for of_table in wanted.indexes.values():
                    of_table.discard(name)
        elif step["function"] is not None:
            wanted.functions[step["function"]] = step["source"]
        else:
            _alter(wanted, step["altered"], step["changes"])
    if dialect_name == "sqlite":
        # the index of a primary key has no name
        wanted.indexes = {
            table: {name for name in names if name != "PRIMARY" and not name.endswith("_pkey")}
            for table, names in wanted.indexes.items()
        }
    return wanted


def _alter(wanted: Catalogue, table: str, changes: str) -> None:
    for verb, kind, name in _CHANGE.findall(changes):
        of_table = (wanted.columns if kind == "COLUMN" else wanted.indexes)[table]
        if verb == "ADD":
            of_table.add(name)
        else:
            of_table.discard(name)


async def catalogue(db: Transaction, dialect: Dialect) -> tuple[Catalogue, list[tuple[str, str]]]:
    """Read what the database has, and its invalid indexes with their tables, in an open transaction."""
    actual, invalid = Catalogue(), list[tuple[str, str]]()
    for table, column in (await db.execute(dialect.statement("doctor_columns"))).rows:
        actual.columns.setdefault(str(table), set()).add(str(column))
    for table, index, valid in (await db.execute(dialect.statement("doctor_indexes"))).rows:
        actual.indexes.setdefault(str(table), set()).add(str(index))
        if not valid:
            invalid.append((str(table), str(index)))
    if dialect.has("doctor_functions"):
        for name, source in (await db.execute(dialect.statement("doctor_functions"))).rows:
            actual.functions[str(name)] = str(source)
    return actual, invalid


def missing(wanted: Catalogue, actual: Catalogue) -> list[str]:
    """Return what is missing, for people."""
    lacking: list[str] = []
    for table, columns in wanted.columns.items():
        if table not in actual.columns:
            lacking.append(f"{'table' if columns else 'view'} {table}")
            continue
        lacking += [f"column {table}.{name}" for name in sorted(columns - actual.columns[table])]
        kept = actual.indexes.get(table, set())
        lacking += [
            f"index {name} of {table}" for name in sorted(wanted.indexes.get(table, set()) - kept)
        ]
    return lacking + [
        f"function {name}" for name in wanted.functions if name not in actual.functions
    ]


def changed(wanted: Catalogue, actual: Catalogue) -> list[str]:
    """Name the functions whose source differs."""
    return [
        name
        for name, source in wanted.functions.items()
        if actual.functions.get(name, source).strip() != source.strip()
    ]
