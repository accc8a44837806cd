"""What a handler sets is seen by no other message, on no kind of connection (promise 2.15)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.connections.test_base_conformance import every
from tests.connections.test_base_processing import app_of
from tests.support.connections import KINDS, Given, do
from tests.support.databases import Raw
from tests.support.leasing import Leasing
from txbox import App, Message, Outcome, session
from txbox.connections.settings import Settings
from txbox.events import Event, HandlerRunsAlone
from txbox.processing.intake import Mode
from txbox.session import drive, drive_async

pytestmark = pytest.mark.every_database

OBJECTS = """
CREATE TABLE IF NOT EXISTS seen (
    id text PRIMARY KEY, tenant text, path text, who text, at_once boolean,
    mark integer, CONSTRAINT seen_mark UNIQUE (mark) DEFERRABLE INITIALLY IMMEDIATE);
CREATE TABLE IF NOT EXISTS tenancy (name text);
CREATE OR REPLACE FUNCTION set_tenant(name text) RETURNS void LANGUAGE sql
    AS $$ SELECT set_config('app.tenant', name, true) $$;
CREATE OR REPLACE FUNCTION login(name text) RETURNS void LANGUAGE plpgsql
    AS $$ BEGIN PERFORM set_tenant(name); END $$;
CREATE OR REPLACE FUNCTION stay(name text) RETURNS void LANGUAGE plpgsql
    AS $$ BEGIN EXECUTE 'SET app.tenant = ' || quote_literal(name); END $$;
CREATE OR REPLACE FUNCTION on_tenancy() RETURNS trigger LANGUAGE plpgsql
    AS $$ BEGIN -- all that follows
        SET LOCAL app.tenant = 'A'; RETURN NEW; END $$;
CREATE OR REPLACE TRIGGER enters BEFORE INSERT ON tenancy FOR EACH ROW EXECUTE FUNCTION on_tenancy();
CREATE OR REPLACE FUNCTION checks_at_once() RETURNS boolean LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO seen (id, mark) VALUES ('x', -1), ('y', -1);
        DELETE FROM seen WHERE mark = -1;
        RETURN false;
    EXCEPTION WHEN unique_violation THEN RETURN true;
    END $$;
"""
LOOK = (
    "INSERT INTO public.seen (id, tenant, path, who, at_once) SELECT '{0}', current_setting('app.tenant', true), "
    "current_setting('search_path'), current_user, public.checks_at_once()"
)
# by whom → what it runs, before it looks or (then what it has set would refuse that) behind it
SETTERS = {
    "set_local": ("SET LOCAL app.tenant = 'A'", True),
    "comment": ("/* who */ set local app.tenant = 'A'", True),
    "set_config": ("SELECT set_config('app.tenant', 'A', true)", True),
    "function": ("SELECT set_tenant('A')", True),
    "nested": ("SELECT public.login('A')", True),
    "dynamic": ("SELECT stay('A')", True),
    "trigger": ("INSERT INTO tenancy VALUES ('A')", True),
    "block": ("DO $$ BEGIN PERFORM set_config('app.tenant', 'A', false); END $$", True),
    "path": ("SET LOCAL search_path = pg_catalog, public", True),
    "role": ("SET ROLE pg_read_all_data", False),
    "constraints": ("SET CONSTRAINTS public.seen_mark DEFERRED", True),
    "read_only": ("SET TRANSACTION READ ONLY", False),
    "session": ("SET app.tenant = 'A'", True),
    "temporary": ("CREATE TEMPORARY TABLE tenancy (name text)", True),
}


@pytest.fixture
def seen(db: Raw) -> Raw:
    db.execute(OBJECTS)
    db.execute("TRUNCATE seen, tenancy")
    return db


def driven(given: Given, app: App, operation: Any, *args: Any, **options: Any) -> Any:
    """Run an operation in a session of the app's."""
    if given.kind.is_async:
        assert app.database.asynchronous is not None
        return given.wait(drive_async(app.database.asynchronous, operation, *args, **options))
    assert app.database.sync is not None
    return drive(app.database.sync, operation, *args, **options)


class Tenants:
    """A handler that looks at what is set, and sets something itself for the messages of tenant A."""

    def __init__(self, given: Given, number: int, setter: str, **options: Any) -> None:
        self.given = given
        self.app = app_of(given)
        self.events: list[Event] = []
        self.app.events.observers.append(self.events.append)
        sql, before = SETTERS[setter]
        family = given.kind.family
        self.runs: list[str] = []

        def statements(message: Message[Any]) -> list[str]:
            self.runs.append(str(message.id))
            look = [LOOK.format(message.id)]
            if message.payload != b'"A"':
                return look
            return [sql, *look] if before else [*look, sql]

        register: Any = self.app.handler("t", consumer=f"settings{number}", **options)
        if given.kind.is_async:

            async def look_async(message: Message[Any], tx: Any) -> None:
                for statement in statements(message):
                    await do(family, tx, statement)

            register(look_async)
        else:

            def look(message: Message[Any], tx: Any) -> None:
                for statement in statements(message):
                    do(family, tx, statement)

            register(look)

        (self.handler,) = self.app.handlers
        self.prepare()

    def drive(self, operation: Any, *args: Any, **options: Any) -> Any:
        return driven(self.given, self.app, operation, *args, **options)

    def prepare(self) -> None:
        """Have it behave as after its first message: the schema is known."""
        self.drive(self.app.protocol.check_schema)

    def take(self, messages: list[Message[Any]], way: str) -> list[Outcome]:
        app = self.app
        if way == "savepoints":
            pace = app.protocol.batch_sizes.of(self.handler)
            for _ in range(200):
                pace.failed(4)
        if way != "stored":
            answers = self.drive(app.intake.take, self.handler, messages)
        else:
            leasing = Leasing(self.drive(app.intake.take, self.handler, messages, Mode.LEASED))
            answers = self.drive(
                app.protocol.run_leased_many, self.handler, leasing.rows, leasing.token
            )
        return [answer.outcome for answer in answers]

    def close(self) -> None:
        self.given.wait(self.app.close_async()) if self.given.kind.is_async else self.app.close()


def messages_of(number: int, count: int, tenant_at: tuple[int, ...] = ()) -> list[Message[Any]]:
    return [
        Message(id=f"s{number + n}", topic="t", payload=b'"A"' if n in tenant_at else b'"B"')
        for n in range(count)
    ]


def stained(seen: Raw, owners: set[str]) -> list[Any]:
    """The rows of others that show what a message of tenant A has set."""
    rows = seen.rows("SELECT id, tenant, path, who, at_once FROM seen")
    (plain,) = seen.rows("SELECT current_setting('search_path'), current_user::text")
    return [
        row
        for row in rows
        if row[0] not in owners and (row[1] or "", row[2], row[3], row[4]) != ("", *plain, True)
    ]


PIPELINES = {"psycopg-url", "psycopg-async-url"}


def ways(given: Given, setter: str) -> list[tuple[str, bool]]:
    """How a batch comes, and whether it is pipelined: everything once, and one setter everywhere."""
    if given.kind.name not in PIPELINES and setter != "function":
        return [("inline", False)]
    pipelined = (False, True) if given.kind.name in PIPELINES else (False,)
    return [(way, piped) for piped in pipelined for way in ("inline", "stored", "savepoints")]


# everything on psycopg; elsewhere what each adapter does by itself
CASES = [
    (kind, setter)
    for kind in KINDS
    if kind.dialect == "postgresql"
    for setter in SETTERS
    if kind.name in PIPELINES or setter in ("set_local", "function", "role", "session")
]


@pytest.mark.parametrize(
    ("given", "setter"),
    CASES,
    ids=[f"{kind}-{setter}" for kind, setter in CASES],
    indirect=["given"],
)
def test_no_neighbour_sees_what_a_message_sets(
    given: Given, seen: Raw, number: int, setter: str
) -> None:
    if given.kind.pooler and setter in ("session", "role", "dynamic", "block", "temporary"):
        pytest.skip("a pooler lends the server's session to others: docs/howto/pgbouncer.md")
    for n, (way, piped) in enumerate(ways(given, setter)):
        seen.execute("TRUNCATE seen, tenancy")
        tenants = Tenants(given, number + n, setter, pipeline=piped)
        batch = messages_of(1000 * number + 100 * n, 6, (2,))
        assert tenants.take(batch, way) == [Outcome.PROCESSED] * 6, (way, piped)
        # the next transaction gets the same connection, where there is a pool
        later = messages_of(1000 * number + 100 * n + 50, 3, (1,))
        assert tenants.take(later, way) == [Outcome.PROCESSED] * 3
        owners = {str(batch[2].id), str(later[1].id)}
        assert stained(seen, owners) == [], (way, piped)
        alone = [event for event in tenants.events if isinstance(event, HandlerRunsAlone)]
        assert len(alone) == 1
        assert "A" not in alone[0].set_by.split()
        # each of the second batch ran once, in a transaction of its own
        assert all(tenants.runs.count(str(message.id)) == 1 for message in later)
        if setter not in ("role", "read_only", "constraints", "path", "temporary"):
            assert seen.value("SELECT tenant FROM seen WHERE id = ?", (batch[2].id,)) == "A"
        tenants.close()


@every(dialects=("postgresql",))
def test_sharing_is_asked_for_by_name(given: Given, seen: Raw, number: int) -> None:
    """With `shares=True` a batch stays one; what is set ends with it even then."""
    if given.kind.pooler:
        pytest.skip("SET is for a session of one's own")
    tenants = Tenants(given, number, "session", shares=True)
    batch = messages_of(1000 * number, 4, (1,))
    assert tenants.take(batch, "inline") == [Outcome.PROCESSED] * 4
    assert tenants.runs == [message.id for message in batch]
    assert len(stained(seen, {str(batch[1].id)})) == 2
    assert not [event for event in tenants.events if isinstance(event, HandlerRunsAlone)]
    later = messages_of(1000 * number + 50, 3)
    tenants.take(later, "inline")
    assert not [row for row in stained(seen, set()) if row[0] in {m.id for m in later}]
    tenants.close()


# -- MySQL, MariaDB and SQLite ---------------------------------------------------------------------

# what one message does, what the next one asks, and what it must get
OTHERS = {
    "postgresql": [
        ("LISTEN tenants", "SELECT count(*) FROM pg_listening_channels()"),
        (
            "SELECT pg_advisory_lock(4711)",
            "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objid = 4711",
        ),
        (
            "DECLARE kept NO SCROLL CURSOR WITH HOLD FOR SELECT 1",
            "SELECT count(*) FROM pg_cursors WHERE is_holdable",
        ),
        (
            "UPDATE pg_settings SET setting = '5555' WHERE name = 'work_mem'",
            "SELECT current_setting('work_mem')",
        ),
        ("SELECT 1 AS n INTO TEMPORARY tenant", "SELECT to_regclass('pg_temp.tenant')::text"),
        ("CREATE TABLE pg_temp.tenant (n int)", "SELECT to_regclass('pg_temp.tenant')::text"),
        (
            "CREATE OR REPLACE TEMP VIEW tenant AS SELECT 1",
            "SELECT to_regclass('pg_temp.tenant')::text",
        ),
        ("DEALLOCATE ALL", "SELECT 1"),
        (
            "SELECT settings_lock()",
            "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND objid = 4712",
        ),
    ],
    "mysql": [
        (
            "SELECT GET_LOCK('txbox-tenant', 0)",
            "SELECT IS_USED_LOCK('txbox-tenant') = CONNECTION_ID()",
        ),
        ("CALL settings_out(@tenant)", "SELECT @tenant"),
        ("SET @tenant = 'A'", "SELECT @tenant"),
        ("SELECT @tenant := 'A'", "SELECT @tenant"),
        ("SELECT 'A' INTO @tenant", "SELECT @tenant"),
        ("SET SESSION sort_buffer_size = 54321", "SELECT @@SESSION.sort_buffer_size"),
        ("SET lock_wait_timeout = 54321", "SELECT @@SESSION.lock_wait_timeout"),
        ("SET sql_mode = ''", "SELECT @@SESSION.sql_mode"),
        ("DO settings_enter('A')", "SELECT @tenant"),
        ("INSERT INTO settings_tenancy VALUES (1)", "SELECT @tenant"),
    ],
    "sqlite": [
        ("PRAGMA cache_size = 77", "PRAGMA cache_size"),
        ("PRAGMA main.cache_size(77)", "PRAGMA cache_size"),
        ("PRAGMA defer_foreign_keys = ON", "PRAGMA defer_foreign_keys"),
        ("PRAGMA case_sensitive_like = ON", "SELECT 'a' LIKE 'A'"),
        ("CREATE TEMP TABLE tenant AS SELECT 'A'", "SELECT count(*) FROM sqlite_temp_master"),
        (
            "CREATE TABLE IF NOT EXISTS temp.tenant AS SELECT 'A'",
            "SELECT count(*) FROM sqlite_temp_master",
        ),
    ],
}
# a server that is MariaDB has these as well
MARIADB_ONLY = [
    ("BEGIN NOT ATOMIC SET @tenant = 'A'; END", "SELECT @tenant"),
    ("EXECUTE IMMEDIATE 'SET @tenant = 1'", "SELECT @tenant"),
]
MYSQL_OBJECTS = (
    "DROP PROCEDURE IF EXISTS settings_out",
    "CREATE PROCEDURE settings_out(OUT name text) SELECT 'A' INTO name",
    "CREATE TABLE IF NOT EXISTS settings_tenancy (n int)",
    "DROP FUNCTION IF EXISTS settings_enter",
    "CREATE FUNCTION settings_enter(name text) RETURNS int NO SQL BEGIN SET @tenant = name; RETURN 1; END",
    "DROP TRIGGER IF EXISTS settings_enters",
    "CREATE TRIGGER settings_enters BEFORE INSERT ON settings_tenancy FOR EACH ROW SET @tenant = 'A'",
)


async def fetched(given: Given, tx: Any, sql: str) -> Any:
    """The first value of a query, on whatever a handler gets."""
    family = given.kind.family
    if family == "sqlalchemy":
        import sqlalchemy as sa

        result = tx.execute(sa.text(sql.replace(":=", "\\:=")))
        result = await result if given.kind.is_async else result
        return result.scalar() if result.returns_rows else None
    if family in ("sqlite3", "aiosqlite"):
        cursor = tx.execute(sql)
        if given.kind.is_async:
            row = await (await cursor).fetchone()
        else:
            row = cursor.fetchone()
        return row and row[0]
    if family == "asyncpg":
        return await tx.fetchval(sql)
    if given.kind.is_async:
        async with tx.cursor() as cursor:
            await cursor.execute(sql)
            row = await cursor.fetchone() if cursor.description else None
    else:
        with tx.cursor() as cursor:
            cursor.execute(sql)
            row = cursor.fetchone() if cursor.description else None
    return row and row[0]


class Asks:
    """Runs the SQL that a message carries, and keeps what it answers."""

    def __init__(self, given: Given, number: int, **options: Any) -> None:
        self.given, self.answers = given, dict[str, Any]()
        self.app = app_of(given)
        register: Any = self.app.handler("t", consumer=f"asks{number}", **options)
        if given.kind.is_async:

            async def ask_async(message: Message[Any], tx: Any) -> None:
                await self.ask(message, tx)

            register(ask_async)
        else:

            def ask(message: Message[Any], tx: Any) -> None:
                given.wait(self.ask(message, tx))

            register(ask)

        (self.handler,) = self.app.handlers

    async def ask(self, message: Message[Any], tx: Any) -> None:
        self.answers[str(message.id)] = await fetched(self.given, tx, message.json())

    def process(self, message_id: str, sql: str) -> Any:
        message = Message[Any](id=message_id, topic="t", payload=json.dumps(sql).encode())
        if self.given.kind.is_async:
            outcome = self.given.wait(self.app.process_async(message))
        else:
            outcome = self.app.process(message)
        assert outcome is Outcome.PROCESSED
        return self.answers[message_id]

    def close(self) -> None:
        self.given.wait(self.app.close_async()) if self.given.kind.is_async else self.app.close()


@every(dialects=("postgresql", "mysql", "sqlite"))
def test_no_later_message_sees_what_a_message_sets(given: Given, db: Raw, number: int) -> None:
    if given.kind.pooler:
        pytest.skip("a pooler lends the server's session to others: docs/howto/pgbouncer.md")
    if given.kind.dialect == "mysql":
        for sql in MYSQL_OBJECTS:
            db.execute(sql)
    if given.kind.dialect == "postgresql":
        db.execute(
            "CREATE OR REPLACE FUNCTION settings_lock() RETURNS void LANGUAGE sql"
            " AS 'SELECT pg_advisory_lock(4712)'"
        )
    asks = Asks(given, number)
    more = MARIADB_ONLY if given.kind.product == "mariadb" else []
    for n, (sets, asked) in enumerate([*OTHERS[given.kind.dialect], *more]):
        before = asks.process(f"a{number}-{n}", asked)
        asks.process(f"b{number}-{n}", sets)
        assert asks.process(f"c{number}-{n}", asked) == before, sets
    asks.close()


QUIET = {
    "postgresql": [
        "INSERT INTO temp VALUES (1)", "INSERT INTO temp (n) VALUES (1)", "SELECT pg_advisory_xact_lock(1)",
        "UPDATE settings SET setting = 1", "SELECT pg_advisory_unlock(1)", "SELECT name FROM pg_settings",
        "CREATE TABLE temperature (n int)", "DECLARE c CURSOR FOR SELECT 1",
    ],
    "mysql": [
        "CALL book(1, 'a')", "UPDATE locks SET get_lock = 1", "SELECT a AS handler FROM t", "BEGIN", "COMMIT",
        "SELECT CASE WHEN a THEN 1 ELSE 2 END FROM t",
    ],
    "sqlite": ["CREATE TABLE temporary_things (n)", "INSERT INTO t VALUES ('temp.x')"],
}  # fmt: skip


@pytest.mark.parametrize(("dialect", "text"), [(d, t) for d, texts in QUIET.items() for t in texts])
def test_what_only_looks_like_a_setting_runs_with_others(dialect: str, text: str) -> None:
    assert Settings(dialect).of(text) is None


@every(dialects=("sqlite",))
def test_no_neighbour_sees_a_pragma(given: Given, db: Raw, number: int) -> None:
    asks = Asks(given, number)
    driven(given, asks.app, asks.app.protocol.check_schema)
    sqls = ["PRAGMA cache_size", "PRAGMA cache_size = 77", "PRAGMA cache_size", "PRAGMA cache_size"]
    batch = [
        Message(id=f"p{number}-{n}", topic="t", payload=f'"{sql}"'.encode())
        for n, sql in enumerate(sqls)
    ]
    answers = driven(given, asks.app, asks.app.intake.take, asks.handler, batch)
    assert [answer.outcome for answer in answers] == [Outcome.PROCESSED] * 4
    before, _, *after = [asks.answers[str(message.id)] for message in batch]
    assert after == [before, before]
    assert before != 77
    asks.close()


# -- what is set on the object ---------------------------------------------------------------------


class _Raises:
    """Stands for a loader that would break whatever reads through it."""

    def __init__(self, oid: int, context: Any = None) -> None: ...

    format = 0

    def load(self, data: Any) -> Any:
        raise AssertionError("a neighbour's loader was asked")


def touch_psycopg(raw: Any) -> None:
    from psycopg import ClientCursor
    from psycopg.adapt import Loader
    from psycopg.rows import dict_row

    loader = type("Raises", (_Raises, Loader), {})
    for name in ("int2", "int4", "int8", "text", "bytea", "bool", "timestamptz", "float8"):
        raw.adapters.register_loader(name, loader)
    raw.row_factory = dict_row
    raw.prepare_threshold = 0
    cursors = {"Connection": ClientCursor}
    if type(raw).__name__ in cursors:
        raw.cursor_factory = cursors[type(raw).__name__]


def look_psycopg(raw: Any) -> Any:
    return (
        raw.row_factory.__name__, raw.prepare_threshold, raw.cursor_factory.__name__,
        raw.adapters.get_loader(23, 0).__name__,
    )  # fmt: skip


def touch_sqlite(tx: Any) -> None:
    tx.row_factory = lambda cursor, row: "mine"
    tx.text_factory = bytes


def look_sqlite(tx: Any) -> Any:
    return (tx.row_factory, tx.text_factory)


def touch_pymysql(tx: Any) -> None:
    from pymysql.cursors import DictCursor

    tx.cursorclass = DictCursor
    tx.decoders[3] = tx.decoders[8] = lambda value: 1 / 0


def look_pymysql(tx: Any) -> Any:
    return (tx.cursorclass, 3 in tx.decoders and tx.decoders[3] is int)


def _sync(tx: Any) -> Any:
    return getattr(tx, "sync_session", None) or getattr(tx, "sync_connection", None) or tx


def touch_sqlalchemy(tx: Any) -> None:
    raw = _sync(tx)
    if hasattr(raw, "info") and hasattr(raw, "get_bind"):
        raw.info["tenant"] = "A"
        raw = raw.connection()
    raw.execution_options(schema_translate_map={None: "tenant_a"})


def look_sqlalchemy(tx: Any) -> Any:
    raw = _sync(tx)
    options = raw.connection() if hasattr(raw, "get_bind") else raw
    return (
        raw.info.get("tenant"),
        options.get_execution_options().get("schema_translate_map"),
    )


def touch_django(tx: Any) -> None:
    tx.execute_wrappers.append(lambda execute, *args: execute(*args))
    if hasattr(tx.connection, "adapters"):
        touch_psycopg(tx.connection)


def look_django(tx: Any) -> Any:
    driver = look_psycopg(tx.connection) if hasattr(tx.connection, "adapters") else None
    return (len(tx.execute_wrappers), driver)


OBJECTS_OF: dict[str, tuple[Any, Any]] = {
    "psycopg": (touch_psycopg, look_psycopg),
    "sqlite3": (touch_sqlite, look_sqlite),
    "aiosqlite": (touch_sqlite, look_sqlite),
    "pymysql": (touch_pymysql, look_pymysql),
    "sqlalchemy": (touch_sqlalchemy, look_sqlalchemy),
    "django": (touch_django, look_django),
}


@every()
def test_what_a_handler_registers_on_its_connection_stays_with_its_message(
    given: Given, db: Raw, number: int
) -> None:
    if given.kind.family not in OBJECTS_OF:
        pytest.skip("its objects have nothing to set, or test_codecs tests it")
    touch, look = OBJECTS_OF[given.kind.family]
    app, looks = app_of(given), dict[str, Any]()

    def touched(message: Message[Any], tx: Any) -> None:
        looks[str(message.id)] = look(tx)
        if message.payload == b'"A"':
            touch(tx)

    register: Any = app.handler("t", consumer=f"objects{number}")
    if given.kind.is_async:

        async def handle_async(message: Message[Any], tx: Any) -> None:
            if given.kind.family == "sqlalchemy":
                await tx.run_sync(lambda _: touched(message, tx))
            else:
                touched(message, tx)

        register(handle_async)
    else:
        register(touched)
    (handler,) = app.handlers
    run = partial(driven, given, app)
    run(app.protocol.check_schema)
    batch = messages_of(1000 * number, 4, (1,))
    if given.kind.dialect != "mysql":
        answers = run(app.intake.take, handler, batch)
    else:
        answers = [answer for one in batch for answer in run(app.intake.take, handler, [one])]
    assert [answer.outcome for answer in answers] == [Outcome.PROCESSED] * 4
    again = messages_of(1000 * number, 6, (1,))
    # reads rows through whatever the connection has, and the next batch gets the same connection
    answers = [answer for one in again for answer in run(app.intake.take, handler, [one])]
    assert [answer.outcome for answer in answers] == [Outcome.DUPLICATE] * 4 + [
        Outcome.PROCESSED
    ] * 2
    assert len(set(looks.values())) == 1, looks
    given.wait(app.close_async()) if given.kind.is_async else app.close()


@every(dialects=("postgresql",))
def test_codecs(given: Given, db: Raw, number: int) -> None:
    """asyncpg's codecs, and statements that a handler prepares by name."""
    if given.kind.family != "asyncpg" or given.kind.pooler:
        pytest.skip("codecs are asyncpg's")
    app, seen = app_of(given), dict[str, Any]()

    @app.handler("t", consumer=f"codecs{number}")
    async def handle(message: Message[Any], tx: Any) -> None:
        seen[str(message.id)] = await tx.fetchval("SELECT 5::int4")
        if message.payload == b'"A"':
            await tx.set_type_codec(
                "int4", schema="pg_catalog", encoder=str, decoder=lambda text: f"A {text}"
            )

    (handler,) = app.handlers
    driven(given, app, app.protocol.check_schema)
    driven(given, app, app.intake.take, handler, messages_of(1000 * number, 4, (1,)))
    driven(given, app, app.intake.take, handler, messages_of(1000 * number + 10, 1))
    assert set(seen.values()) == {5}
    given.wait(app.close_async())


@every(dialects=("postgresql",))
def test_a_name_that_a_handler_prepares_is_free_for_the_next(
    given: Given, db: Raw, number: int
) -> None:
    if given.kind.pooler:
        pytest.skip("PREPARE is for a session of one's own")
    asks = Asks(given, number)
    for n in range(3):
        family = given.kind.family
        message = Message[Any](id=f"n{number}-{n}", topic="t", payload=b"{}")

        async def ask(message: Message[Any], tx: Any, family: str = family) -> None:
            done = do(family, tx, "PREPARE mine AS SELECT 1")
            if given.kind.is_async:
                await done

        asks.ask = ask  # type: ignore[method-assign]  # what a message asks for here is one statement
        if given.kind.is_async:
            assert given.wait(asks.app.process_async(message)) is Outcome.PROCESSED
        else:
            assert asks.app.process(message) is Outcome.PROCESSED
    asks.close()


@pytest.mark.parametrize(
    ("made", "used"),
    [
        ("CREATE VIEW tenant AS SELECT set_config('app.tenant', 'A', true) AS name", "SELECT * FROM tenant"),
        ("CREATE FUNCTION tenant() RETURNS void LANGUAGE sql AS 'SET app.tenant = 1'", "SELECT tenant()"),
        ("", "SELECT tenant()"),
    ],
    ids=["view", "function", "nothing"],
)  # fmt: skip
def test_the_catalogue_is_searched_where_anything_could_set_something(
    postgresql_url: str,
    raw: Callable[[str], Raw],
    monkeypatch: pytest.MonkeyPatch,
    made: str,
    used: str,
) -> None:
    """Planning the search takes the server 10 ms, at each start of a process and ever again."""
    if made:
        raw(postgresql_url).execute(made)
    points: list[str] = []
    monkeypatch.setattr(session, "crash_point", points.append)
    with App(postgresql_url) as app:
        assert app.database.sync is not None
        drive(app.database.sync, app.protocol.check_schema)
        assert app.database.handler_settings is not None
        assert (app.database.handler_settings.of(used) is not None) is bool(made)
    assert "before:may_set" in points
    assert ("before:setters" in points) is bool(made)
