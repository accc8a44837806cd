"""The tables: versioned migrations, the check at start, and the rights that each role needs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files

from txbox.errors import ConfigurationError, Fault, SchemaError, StoreError
from txbox.steps import Begin, Commit, Rollback, Statement, Steps
from txbox.store import partitions
from txbox.store.dialect import Dialect, qualified
from txbox.store.dialect import dialect as load_dialect
from txbox.store.partitions import Partitioning

#: The schema version that this release writes, and the oldest one it still works with.
VERSION = 8
OLDEST_USABLE = 8

# where the inbox becomes a partitioned table
_INBOX_ENDS = "CONSTRAINT txbox_inbox_pkey PRIMARY KEY (consumer, message_id)\n);"

_FILE = re.compile(r"(\d{4})_\w+\.sql")
# a dollar-quoted body, a string, a comment, or the semicolon that ends a statement
_PIECE = re.compile(r"\$(\w*)\$.*?\$\1\$|'(?:[^']|'')*'|--[^\n]*|;", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SchemaState:
    """What the database holds: the version, and the PostgreSQL schema the tables are in.

    Attributes:
        version: None when there are no tables.
        compatible_from: the oldest version whose releases can work with them.
    """

    version: int | None
    compatible_from: int | None
    schema: str | None


def migration_text(
    dialect: Dialect,
    schema: str | None,
    after: int = 0,
    upto: int = VERSION,
    *,
    partitioning: Partitioning | None = None,
) -> str:
    """Return the SQL that leads from version `after` (0: nothing) to version `upto`.

    Raises:
        ConfigurationError: partitions of a table that is there, or on a database without them.
    """
    folder = files("txbox.store").joinpath("migrations").joinpath(dialect.name)
    texts: list[str] = []
    for entry in sorted(folder.iterdir(), key=lambda found: found.name):
        named = _FILE.fullmatch(entry.name)
        if named and after < int(named[1]) <= upto:
            texts.append(entry.read_text())
    if partitioning is not None:
        _check_partitions(dialect)
        if after or upto < VERSION:
            raise ConfigurationError(
                "Partitions are chosen when the tables are made, at this release's version: leave the option out "
                "of an upgrade, or leave --from and --to out."
            )
        by = "HASH (consumer, message_id)" if partitioning.kind == "hash" else "RANGE (message_id)"
        texts[0] = texts[0].replace(_INBOX_ENDS, f"{_INBOX_ENDS[:-1]} PARTITION BY {by};")
        name = "partition_hash.sql" if partitioning.kind == "hash" else "partition_time.sql"
        texts.append(_filled(folder.joinpath(name).read_text(), partitioning))
    text = "\n".join(texts)
    if schema is None:
        return text
    return f'CREATE SCHEMA IF NOT EXISTS "{schema}";\n\n{qualified(text, schema)}'


def _check_partitions(dialect: Dialect) -> None:
    if not dialect.has("partitions"):
        raise ConfigurationError(
            "The inbox can be partitioned on PostgreSQL only: leave the option out."
        )


def _filled(text: str, partitioning: Partitioning) -> str:
    values = {
        "ids": partitioning.kind,
        "length_s": f"{partitioning.length.total_seconds():.0f}",
        "ahead": str(partitioning.ahead),
    }
    for name, value in values.items():
        text = text.replace(f"[{name}]", value)
    return text


def split(text: str) -> list[str]:
    """Split SQL into statements, at semicolons outside of strings, comments and function bodies."""
    statements: list[str] = []
    start = 0
    for piece in _PIECE.finditer(text):
        if piece[0] == ";":
            statements.append(text[start : piece.start()].strip())
            start = piece.end()
    statements.append(text[start:].strip())
    bare = (re.sub(r"^(?:\s*--[^\n]*\n?)+", "", statement).strip() for statement in statements)
    return [statement for statement in bare if statement]


def read_state(dialect: Dialect) -> Steps[SchemaState]:
    """Read which version is applied; for a transaction that is already open."""
    exists = yield dialect.statement("schema_exists")
    if not exists.rows[0][0]:
        return SchemaState(None, None, None)
    found = yield dialect.statement("schema_version")
    version, compatible_from = found.rows[0] if found.rows else (None, None)
    return SchemaState(version, compatible_from, exists.rows[0][1])


def check(dialect: Dialect) -> Steps[SchemaState]:
    """Check that this release can work with the tables, in a transaction of its own.

    Raises:
        SchemaError: missing, too old or too new tables, or a guard that does not fire.
    """
    yield Begin()
    try:
        state = yield from read_state(dialect)
    except StoreError as error:
        if error.fault is not Fault.SCHEMA:
            raise
        # dropped between the two statements
        state = SchemaState(None, None, None)
    if state.version is None:
        yield Rollback()
        raise SchemaError(
            "The txbox tables are missing: run `txbox init`, or apply the output of `txbox schema print`."
        )
    if state.version < OLDEST_USABLE:
        yield Rollback()
        raise SchemaError(
            f"The txbox tables are at version {state.version}, this release needs {OLDEST_USABLE}: "
            "run `txbox schema apply`."
        )
    if state.version > VERSION and (state.compatible_from or state.version) > VERSION:
        yield Rollback()
        raise SchemaError(
            f"The txbox tables are at version {state.version}, which this release (version {VERSION}) cannot use: "
            "upgrade txbox with `pip install -U txbox`."
        )
    if dialect.has("guard_check"):
        guarded = (
            load_dialect(dialect.name, state.schema) if dialect.name == "postgresql" else dialect
        )
        try:
            triggers, role = (yield guarded.statement("guard_check")).rows[0]
        except StoreError as error:
            if error.fault is not Fault.SCHEMA:
                raise
            yield Rollback()
            raise incomplete(error) from None
        if not triggers or role != "origin":
            yield Rollback()
            raise SchemaError(
                "The transaction guard does not fire: the trigger txbox_inbox_guard must be enabled always and "
                "session_replication_role be origin (PostgreSQL), or the table txbox_inbox be InnoDB (MySQL); "
                "compare the tables with `txbox schema print`."
            )
    yield Commit()
    return state


def incomplete(error: StoreError) -> SchemaError:
    """The error for tables that are not what their recorded version says."""
    return SchemaError(
        f"A table, column or function of txbox's is missing although its version is recorded ({error}): "
        "compare the tables with `txbox schema print`, and restore what was changed."
    )


def apply(
    dialect: Dialect, schema: str | None, partitioning: Partitioning | None = None
) -> Steps[tuple[int, int]]:
    """Bring the tables to this release's version; returns the versions before and after.

    Raises:
        ConfigurationError: the tables are there, and not partitioned as asked.

    Guarantee: two callers at once end with one schema; where DDL is transactional a crash leaves the
    old version, elsewhere running it again completes it.
    """
    if partitioning is not None:
        _check_partitions(dialect)
    yield Begin()
    if dialect.has("schema_lock"):
        yield dialect.statement("schema_lock")
    state = yield from read_state(dialect)
    before = state.version or 0
    if before and partitioning is not None:
        found = yield from partitions.read(dialect)
        if found.kind != partitioning.kind:
            yield Rollback()
            raise ConfigurationError(
                f"The inbox is there, and {_as_found(found.kind)}: partitions are chosen when the tables are "
                "made. See docs/howto/retention.md for a table with rows."
            )
        partitioning = None
    text = migration_text(dialect, schema, after=before, partitioning=partitioning)
    for number, sql in enumerate(split(text), 1):
        # migrations contain no parameters; the name is the crash point
        yield Statement(f"migration_{number}", sql, {})
    if dialect.has("schema_unlock"):
        yield dialect.statement("schema_unlock")
    yield Commit()
    return before, max(before, VERSION)


def _as_found(kind: partitions.Kind | None) -> str:
    return "not partitioned" if kind is None else f"partitioned for {kind}"


def creators(dialect: Dialect) -> Steps[list[str]]:
    """Name the roles that may create in the schema of the tables, beside their owners and superusers.

    Each can have an operator or a function of its own called by whoever uses the tables.
    """
    if not dialect.has("schema_creators"):
        return []
    yield Begin()
    found = yield dialect.statement("schema_creators")
    yield Commit()
    return [str(row[0]) for row in found.rows]


def grants(dialect: Dialect, kind: partitions.Kind | None = None) -> dict[str, str]:
    """Return the rights that each role needs, as SQL with `<role>` to fill in; none where there are no roles.

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
    return {
        "consumer": [
            ("SELECT, INSERT, UPDATE", "txbox_inbox"),
            ("SELECT, INSERT", "txbox_attempt"),
            ("SELECT, INSERT, UPDATE", "txbox_quarantine"),
            # MySQL writes a row again that is there, instead of leaving it alone
            ("SELECT, INSERT, UPDATE" if mysql else "SELECT, INSERT", "txbox_outbox"),
            ("SELECT, INSERT, UPDATE", "txbox_sequence"),
            ("SELECT, INSERT, UPDATE", "txbox_job"),
            ("SELECT", "txbox_schema"),
        ],
        "relay": [
            ("SELECT, UPDATE, DELETE", "txbox_outbox"),
            # MySQL shows what the check at start asks only to who may read the table
            *([("SELECT", "txbox_inbox")] if mysql else []),
            ("SELECT", "txbox_schema"),
        ],
        "maintenance": [
            ("SELECT, UPDATE, DELETE", "txbox_inbox"),
            ("SELECT, INSERT, DELETE", "txbox_attempt"),
            ("SELECT, UPDATE, DELETE", "txbox_quarantine"),
            # a rescued message that is given up may leave a letter
            ("SELECT, INSERT, UPDATE, DELETE", "txbox_outbox"),
            ("SELECT, INSERT, UPDATE", "txbox_job"),
            ("SELECT", "txbox_schema"),
            *(_PARTITION_RIGHTS if timed else ()),
        ],
        "operator": [
            ("SELECT, INSERT, UPDATE", "txbox_inbox"),
            ("SELECT", "txbox_attempt"),
            ("SELECT, UPDATE", "txbox_quarantine"),
            ("SELECT, UPDATE", "txbox_outbox"),
            ("SELECT", "txbox_sequence"),
            # on PostgreSQL the login and the time are the database's word
            (
                "SELECT, INSERT" if mysql else f"SELECT, INSERT ({_AUDITED})",
                "txbox_audit",
            ),
            ("SELECT", "txbox_dead_letters"),
            ("SELECT", "txbox_status"),
            ("SELECT", "txbox_schema"),
        ],
        "readonly": [("SELECT", table) for table in _READABLE],
    }


_AUDITED = "actor, action, filter, affected, reason"

_PARTITION_RIGHTS = (
    ("EXECUTE", "FUNCTION txbox_partition_make(timestamptz, timestamptz, integer)"),
    ("EXECUTE", "FUNCTION txbox_partition_drop(text, double precision)"),
)

_READABLE = (
    "txbox_status",
    "txbox_dead_letters",
    "txbox_inbox",
    "txbox_attempt",
    "txbox_quarantine",
    "txbox_outbox",
    "txbox_sequence",
    "txbox_schema",
)
