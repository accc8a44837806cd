"""`pipeline=True`: statements put off until close and COMMIT, on psycopg by URL or by a pool that can (PostgreSQL)."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.types.json import Jsonb
from psycopg_pool import AsyncConnectionPool, ConnectionPool

from tests.support.databases import Raw
from tests.support.proxy import Cut, Proxy
from tests.support.shop import CONSUMER, TOPIC, effects, paid, the_row
from tests.support.waiting import eventually
from txbox import App, Lease, Message, Outcome, Outgoing
from txbox.brokers.local import Local
from txbox.events import Event, TransactionRetried
from txbox.handlers import Handler
from txbox.session import drive, drive_async

pytestmark = pytest.mark.every_database

INSERT = "INSERT INTO effect (message_id, note) VALUES (%s, '')"
REFUSED = "INSERT INTO effect (message_id, note) VALUES (%s::int::text, '')"
SECOND = "INSERT INTO effect (note, message_id) VALUES ('', %s)"
IDS = [f"m{number}" for number in range(5)]


class _Traced(psycopg.Connection[Any]):
    """A connection with an `execute` of its own: nothing may go past it."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        return super().execute(*args, **kwargs)


class _AsyncTraced(psycopg.AsyncConnection[Any]):
    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        return await super().execute(*args, **kwargs)


class Bench:
    """An app on one way to connect; handlers are written once, as async functions, sync and async."""

    def __init__(self, url: str, way: str, **options: Any) -> None:
        self.raw = Raw(url)
        self.raw.execute("CREATE TABLE IF NOT EXISTS effect (message_id text NOT NULL, note text)")
        self.events: list[Event] = []
        self.is_async = way.startswith("async")
        self.puts_off = not way.endswith("traced-pool")
        self._runner = asyncio.Runner()
        self._closing = contextlib.ExitStack()
        made = _AsyncTraced if self.is_async else _Traced
        kind: dict[str, Any] = {"connection_class": made} if way.endswith("traced-pool") else {}
        if way.endswith("unprepared-pool"):
            kind = {"kwargs": {"prepare_threshold": None}}
        if not way.endswith("pool"):
            url += "?prepare=off" if way.endswith("unprepared") else ""
            self.app = App(url, observers=[self.events.append], **options)
        elif self.is_async:
            pool = AsyncConnectionPool(url, min_size=1, max_size=2, open=False, **kind)
            self.wait(pool.open())
            self._closing.callback(lambda: self.wait(pool.close()))
            self.app = App(pool, observers=[self.events.append], **options)
        else:
            sync = ConnectionPool(url, min_size=1, max_size=2, open=True, **kind)
            self._closing.enter_context(sync)
            self.app = App(sync, observers=[self.events.append], **options)

    def wait(self, value: Awaitable[Any]) -> Any:
        async def waited() -> Any:
            return await value

        return self._runner.run(waited())

    def close(self) -> None:
        if self.is_async:
            self.wait(self.app.close_async())
        else:
            self.app.close()
        self._closing.close()
        self.raw.close()
        self._runner.close()

    def handler(
        self, function: Callable[[Message[Any], Any], Any], consumer: str = CONSUMER, **options: Any
    ) -> Handler:
        """`function` is a generator: what it yields is awaited where that is needed."""

        def sync(message: Message[Any], tx: Any) -> None:
            _run(function(message, tx), lambda value: value)

        async def asynchronous(message: Message[Any], tx: Any) -> None:
            steps, answer = function(message, tx), None
            with contextlib.suppress(StopIteration):
                while True:
                    value = steps.send(answer)
                    try:
                        answer = await value if hasattr(value, "__await__") else value
                    except Exception as error:  # noqa: BLE001  # the handler's own to catch
                        answer = await steps.throw(error)

        options.setdefault("pipeline", True)
        result = asynchronous if self.is_async else sync
        register: Any = self.app.handler(TOPIC, consumer=consumer, **options)
        register(result)
        return self.app.handlers.matching(TOPIC, None, consumer)[0]

    def drive(self, operation: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_async:
            assert self.app.database.asynchronous is not None
            return self.wait(
                drive_async(self.app.database.asynchronous, operation, *args, **kwargs)
            )
        assert self.app.database.sync is not None
        return drive(self.app.database.sync, operation, *args, **kwargs)

    def take(self, handler: Handler, ids: Sequence[str] = IDS) -> list[Outcome]:
        messages = [paid(message_id) for message_id in ids]
        return [each.outcome for each in self.drive(self.app.intake.take, handler, messages)]

    def effects(self, ids: Sequence[str] = IDS) -> list[int]:
        return [effects(self.raw, message_id) for message_id in ids]

    def others(self) -> list[str]:
        """The states of the transactions of other connections to this database."""
        found = self.raw.rows(
            "SELECT state FROM pg_stat_activity WHERE datname = current_database() "
            "AND pid <> pg_backend_pid() AND backend_type = 'client backend' AND xact_start IS NOT NULL"
        )
        return [state for (state,) in found]

    def frequent_failures(self, handler: Handler) -> None:
        pace = self.app.protocol.batch_sizes.of(handler)
        for _ in range(200):
            pace.failed(4)


def _run(steps: Any, wait: Callable[[Any], Any]) -> None:
    for value in steps:
        wait(value)


WAYS = (
    "url",
    "url-unprepared",
    "pool",
    "traced-pool",
    "async-url",
    "async-pool",
    "async-traced-pool",
)


@pytest.fixture(params=WAYS)
def bench_of(request: pytest.FixtureRequest, postgresql_url: str) -> Iterator[Callable[..., Bench]]:
    with contextlib.ExitStack() as made:

        def make(**options: Any) -> Bench:
            bench = Bench(postgresql_url, request.param, **options)
            made.callback(bench.close)
            return bench

        yield make


@pytest.fixture
def bench(bench_of: Callable[..., Bench]) -> Bench:
    return bench_of()


def test_what_is_only_written_is_written_once(bench: Bench) -> None:
    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        yield tx.execute(INSERT, (message.id,))
        if bench.puts_off:
            assert tx.pgconn.pipeline_status, "nothing was put off"

    handler = bench.handler(writes)
    for _ in range(3):  # with statements that are prepared already, too
        assert bench.take(handler) in ([Outcome.PROCESSED] * 5, [Outcome.DUPLICATE] * 5)
    assert bench.effects() == [1] * 5


@pytest.mark.parametrize(
    "way", ["url-unprepared", "unprepared-pool", "async-url-unprepared", "async-unprepared-pool"]
)
def test_behind_a_pooler_nothing_is_prepared_for_anybody(postgresql_url: str, way: str) -> None:
    """Its next transaction may have another server's connection, with other statements under these names."""
    bench, prepared = Bench(postgresql_url, way), list[bytes]()

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        yield tx.execute(INSERT, (message.id,))

    def looks(message: Message[Any], tx: Any) -> Iterator[Any]:
        yield tx.execute(INSERT, (f"seen-{message.id}",))
        rows = tx.cursor()
        yield rows.execute("SELECT count(*) FROM pg_prepared_statements")
        prepared.append(rows.pgresult.get_value(0, 0))

    writer = bench.handler(writes)
    looker = bench.handler(looks, consumer="looks", pipeline=False)
    # psycopg prepares what it has sent five times
    for number in range(12):
        assert bench.take(writer, [f"m{number}"]) == [Outcome.PROCESSED]
        assert bench.take(looker, [f"m{number}"]) == [Outcome.PROCESSED]
    bench.close()
    assert set(prepared) == {b"0"}


@pytest.mark.parametrize("ends", ["well", "raises", "lost"])
def test_when_its_transaction_is_over_a_connection_has_its_own_methods_again(
    bench: Bench, ends: str
) -> None:
    seen: list[Any] = []

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        yield tx.execute(INSERT, (message.id,))
        first = not seen
        seen.append(tx)
        assert bench.puts_off == ("execute" in vars(tx))
        if first and ends == "raises":
            raise ValueError("once")
        if first and ends == "lost":
            tx.pgconn.finish()

    handler = bench.handler(writes)
    (outcome,) = bench.take(handler, ["m0"])
    assert outcome is (Outcome.FAILED if ends == "raises" else Outcome.PROCESSED)
    assert len(seen) == (2 if ends == "lost" else 1)
    assert all(vars(entry).keys().isdisjoint(("execute", "wait")) for entry in seen)


def test_a_method_kept_from_another_transaction_is_psycopgs_again(bench: Bench) -> None:
    kept: dict[Any, Any] = {}

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        execute = kept.setdefault(tx, tx.execute)
        yield execute(INSERT, (message.id,))
        yield tx.execute("UPDATE effect SET note = 'seen' WHERE message_id = %s", (message.id,))

    handler = bench.handler(writes)
    for message_id in IDS:
        assert bench.take(handler, [message_id]) == [Outcome.PROCESSED]
    assert bench.raw.rows("SELECT DISTINCT note FROM effect") == [("seen",)]
    assert bench.effects() == [1] * 5


@pytest.mark.parametrize("frequent", [False, True], ids=["rare", "frequent"])
@pytest.mark.parametrize("later", [False, True], ids=["alone", "with-a-later-one"])
@pytest.mark.parametrize("bad", ["m0", "m2", "m4"])
def test_a_statement_that_fails_later_is_its_own_messages_failure(
    bench: Bench, bad: str, later: bool, frequent: bool
) -> None:
    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        yield tx.execute(INSERT, (message.id,))
        if message.id == bad:
            yield tx.execute(REFUSED, ("no number",))
        # another text: behind a failure it is never parsed
        yield tx.execute(SECOND, (f"{message.id}-second",))
        if later and message.id == "m3":
            raise ValueError("before the flush")

    handler = bench.handler(writes)
    if frequent:
        bench.frequent_failures(handler)
    failing = {bad, "m3"} if later else {bad}
    wanted = [Outcome.FAILED if message_id in failing else Outcome.PROCESSED for message_id in IDS]
    assert bench.take(handler) == wanted
    once = [0 if message_id in failing else 1 for message_id in IDS]
    assert bench.effects() == bench.effects([f"{message_id}-second" for message_id in IDS]) == once
    row = the_row(bench.raw, bad)
    assert (row.error_type, row.attempts) == ("InvalidTextRepresentation", 1)
    if later and bad != "m3":
        assert the_row(bench.raw, "m3").error_type == "ValueError"
    # and the statements prepared behind the failure are usable, or prepared again
    assert bench.take(handler, ["n0", "n1"]) == [Outcome.PROCESSED] * 2
    assert not [event for event in bench.events if isinstance(event, TransactionRetried)]


def test_an_answer_that_is_not_there_is_an_error_and_no_wrong_value(bench: Bench) -> None:
    got: list[Any] = []

    if bench.is_async:
        pytest.skip("the next one, with await in its own words")
    function = _sync_reader(got)
    bench.app.handler(TOPIC, consumer=CONSUMER, pipeline=True)(function)
    (handler,) = bench.app.handlers.matching(TOPIC, None, CONSUMER)
    found = bench.take(handler)
    if bench.puts_off:
        assert (found[2], got) == (Outcome.FAILED, [])
        assert the_row(bench.raw, "m2").error_type == "ProgrammingError"
        assert found.count(Outcome.PROCESSED) == 4
    else:
        assert found == [Outcome.PROCESSED] * 5
    assert bench.effects() == [1, 1, 0 if bench.puts_off else 1, 1, 1]


def _sync_reader(got: list[Any]) -> Callable[[Message[Any], Any], None]:
    def reads(message: Message[Any], tx: Any) -> None:
        tx.execute(INSERT, (message.id,))
        if message.id == "m2":
            got.append(
                tx.execute("SELECT count(*) FROM effect WHERE message_id <> %s", ("x",)).fetchone()
            )

    return reads


@pytest.mark.parametrize("verb", ["fetchone", "fetchall", "fetchmany", "iterate", "rowcount"])
def test_async_and_other_ways_to_read_are_errors_too(postgresql_url: str, verb: str) -> None:
    got: list[Any] = []

    async def reads(message: Message[Any], tx: Any) -> None:
        cursor = await tx.execute("SELECT 42 WHERE %s <> ''", (message.id,))
        if verb == "iterate":
            got.extend([row async for row in cursor])
        elif verb == "rowcount":
            got.append(cursor.rowcount)
        else:
            got.append(await getattr(cursor, verb)())

    bench = Bench(postgresql_url, "async-url")
    try:
        bench.app.handler(TOPIC, consumer=CONSUMER, pipeline=True)(reads)
        (handler,) = bench.app.handlers.matching(TOPIC, None, CONSUMER)
        if verb == "rowcount":
            # no exception is promised; -1 says "not known", as the DB-API has it
            assert bench.take(handler, ["a"]) == [Outcome.PROCESSED]
            assert got == [-1]
        else:
            assert bench.take(handler, ["a"]) == [Outcome.FAILED]
            assert got == []
    finally:
        bench.close()


def test_what_needs_answers_first_sends_what_was_put_off(postgresql_url: str) -> None:
    """Cursors, transactions, pipelines, COPY, executemany, names, %% and %b: all of psycopg still works, in order."""
    seen: list[Any] = []

    def works(message: Message[Any], tx: Any) -> None:
        value = message.id
        tx.execute(INSERT, (value,))
        with tx.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM effect WHERE message_id = %s", (value,))
            seen.append(cursor.fetchone())
            cursor.executemany(INSERT, [(f"{value}-many",), (f"{value}-many",)])
        tx.execute(INSERT, (f"{value}-before",))
        with tx.transaction():
            tx.execute(INSERT, (f"{value}-inside",))
        with contextlib.suppress(ZeroDivisionError), tx.transaction():
            tx.execute(INSERT, (f"{value}-undone",))
            raise ZeroDivisionError
        with tx.pipeline():
            tx.execute(INSERT, (f"{value}-pipeline",))
        with tx.cursor() as cursor, cursor.copy("COPY effect (message_id) FROM STDIN") as copy:
            copy.write_row((f"{value}-copied",))
        tx.execute("INSERT INTO effect VALUES (%(id)s, %(id)s)", {"id": f"{value}-named"})
        tx.execute("INSERT INTO effect VALUES (%s, '100 %%')", (f"{value}-percent",))
        tx.execute("INSERT INTO effect VALUES (%b, '')", (f"{value}-binary",))
        tx.execute(f"INSERT INTO effect VALUES ('{value}-literal', '5 %')")
        seen.append(tx.execute("SELECT 7", binary=True).fetchone())

    bench = Bench(postgresql_url, "url")
    try:
        bench.app.handler(TOPIC, consumer=CONSUMER, pipeline=True)(works)
        (handler,) = bench.app.handlers.matching(TOPIC, None, CONSUMER)
        found = bench.take(handler, ["a", "b"])
        assert found == [Outcome.PROCESSED] * 2, the_row(bench.raw, "a").error
        assert set(seen) == {(1,), (7,)}
        for name in ("a", "b"):
            counts = dict(
                bench.raw.rows(
                    "SELECT message_id, count(*) FROM effect WHERE message_id LIKE ? GROUP BY 1",
                    (f"{name}%",),
                )
            )
            assert counts == {
                name: 1, f"{name}-many": 2, f"{name}-before": 1, f"{name}-inside": 1, f"{name}-pipeline": 1,
                f"{name}-copied": 1, f"{name}-named": 1, f"{name}-percent": 1, f"{name}-binary": 1,
                f"{name}-literal": 1,
            }  # fmt: skip
        notes = dict(bench.raw.rows("SELECT message_id, note FROM effect"))
        assert (notes["a-percent"], notes["a-literal"]) == ("100 %", "5 %")
    finally:
        bench.close()


_FIRST, _LAST = (
    datetime.datetime.fromisoformat("1900-01-01"),
    datetime.datetime.fromisoformat("2100-01-01"),
)
_TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
_NUMBER = st.integers(-(2**63), 2**63 - 1)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | _TEXT,
    lambda each: st.lists(each) | st.dictionaries(_TEXT, each),
    max_leaves=5,
)
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "text": _TEXT,
    "bigint": _NUMBER,
    "double precision": st.floats(),
    "numeric": st.decimals(-(10**15), 10**15, places=6),
    "boolean": st.booleans(),
    "bytea": st.binary(max_size=20),
    "timestamptz": st.datetimes(_FIRST, _LAST, timezones=st.just(datetime.UTC)),
    "timestamp": st.datetimes(_FIRST, _LAST),
    "date": st.dates(_FIRST.date(), _LAST.date()),
    "uuid": st.uuids(),
    "text[]": st.lists(st.none() | _TEXT, max_size=4),
    "bigint[]": st.lists(_NUMBER, max_size=4),
    "jsonb": _JSON.map(Jsonb),
}
_ROWS = st.lists(
    st.tuples(*(st.none() | column for column in COLUMNS.values())), min_size=1, max_size=4
)


@pytest.fixture(scope="module")
def values_bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    from tests.support.databases import BY_NAME, require

    kind = BY_NAME["postgresql"]
    require(kind.missing())
    url = kind.create(tmp_path_factory.mktemp("values"), schema=True)
    made = Bench(url, "url")
    names = ", ".join(f"c{number} {kind}" for number, kind in enumerate(COLUMNS))
    for table in ("plain", "piped"):
        made.raw.execute(f"CREATE TABLE {table} ({names})")
    yield made
    made.close()
    kind.drop(url)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(rows=_ROWS)
def test_values_are_stored_as_psycopg_stores_them(
    values_bench: Bench, rows: list[tuple[Any, ...]]
) -> None:
    bench = values_bench
    marks = ", ".join(["%s"] * len(COLUMNS))
    for table in ("plain", "piped"):
        bench.raw.execute(f"TRUNCATE {table}")
        consumer = f"{table}-{uuid.uuid4().hex}"

        def writes(message: Message[Any], tx: Any, table: str = table) -> Iterator[Any]:
            for row in rows:
                yield tx.execute(f"INSERT INTO {table} VALUES ({marks})", row)

        handler = bench.handler(writes, consumer, pipeline=table == "piped")
        assert bench.take(handler, ["a"]) == [Outcome.PROCESSED]
    stored = [
        bench.raw.rows(f"SELECT own::text FROM {table} AS own ORDER BY 1")
        for table in ("plain", "piped")
    ]
    assert stored[0] == stored[1]
    assert len(stored[0]) == len(rows)


def test_decimal_and_time_zones_beside_other_types_under_one_statement(bench: Bench) -> None:
    """One SQL text, prepared once for each set of types."""
    values: list[Any] = [1, 2**40, "3", Decimal("4.5"), None, 5.5]

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        for value in values:
            yield tx.execute("INSERT INTO effect SELECT 'v', %s::text", (value,))

    assert bench.take(bench.handler(writes), ["a"]) == [Outcome.PROCESSED]
    found = [each for (each,) in bench.raw.rows("SELECT note FROM effect WHERE message_id = 'v'")]
    assert sorted(map(str, found)) == sorted(map(str, ["1", str(2**40), "3", "4.5", None, "5.5"]))


def test_thousands_of_statements_do_not_block_on_full_buffers(bench: Bench) -> None:
    note = "n" * 500

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        for _ in range(5000):
            # RETURNING fills the other direction, too
            yield tx.execute(
                "INSERT INTO effect VALUES (%s, %s) RETURNING note", (message.id, note)
            )

    assert bench.take(bench.handler(writes), ["a"]) == [Outcome.PROCESSED]
    assert bench.effects(["a"]) == [5000]


@pytest.mark.parametrize(
    ("count", "note"),
    [(40, "n"), (10, "n" * 2000), (2, "n" * 20_000_000)],
    ids=["many", "long", "huge"],
)
@pytest.mark.parametrize("way", ["url", "url-unprepared", "async-url"])
def test_a_handler_that_hangs_is_cut_off_by_the_server(
    postgresql_url: str, way: str, count: int, note: str
) -> None:
    """Whatever was put off, the transaction is idle, and holds its row no longer than the lease (promise 4.2)."""
    bench = Bench(postgresql_url, way, lease=Lease(duration=timedelta(seconds=2)))
    runs: list[str] = []

    def hangs(message: Message[Any], tx: Any) -> Iterator[Any]:
        for _ in range(count):
            yield tx.execute("INSERT INTO effect VALUES (%s, %s)", (message.id, note))
        runs.append(str(message.id))
        if len(runs) == 1:
            eventually(lambda: not bench.others(), "the server has ended the transaction")

    try:
        assert bench.take(bench.handler(hangs), ["a"]) == [Outcome.PROCESSED]
        assert len(runs) == 2
        assert bench.effects(["a"]) == [count]
    finally:
        bench.close()


def test_the_server_never_waits_until_its_answers_are_read(bench: Bench) -> None:
    """It would stand still in the middle of the transaction, and that is no idle one."""

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        for _ in range(2000):
            yield tx.execute(
                "INSERT INTO effect VALUES (%s, %s) RETURNING note", (message.id, "n" * 5000)
            )
        # it has all statements, and answers them at its own pace
        eventually(lambda: bench.others() == ["idle in transaction"], "all is answered")

    assert bench.take(bench.handler(writes), ["a"]) == [Outcome.PROCESSED]


def test_what_is_staged_is_put_off_too(postgresql_url: str, bench_of: Callable[..., Bench]) -> None:
    """Messages, ordered ones among them, an effect and a kept result: nobody reads the result of these statements."""
    bench = bench_of(notify=True)
    outbox, effects_of = bench.app.outbox, bench.app.effects
    bench.app.publish(Local(), topics=["invoices"])
    bench.app.effect("mail")(lambda message: None)

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        yield tx.execute(INSERT, (message.id,))
        many = [Outgoing("invoices", b"2", key="k", ordered=True), Outgoing("invoices", b"3")]
        if bench.is_async:
            yield outbox.stage_async(tx, "invoices", b"1", delay=timedelta(0))
            yield outbox.stage_many_async(tx, many)
            yield effects_of.stage_async(tx, "mail", {"to": str(message.id)})
        else:
            outbox.stage(tx, "invoices", b"1", delay=timedelta(0))
            outbox.stage_many(tx, many)
            effects_of.stage(tx, "mail", {"to": str(message.id)})
        yield tx.execute(SECOND, (f"{message.id}-second",))
        if bench.puts_off:
            assert tx.pgconn.pipeline_status, "something waited for an answer"

    handler = bench.handler(writes)
    listening = psycopg.connect(postgresql_url, autocommit=True)
    listening.execute("LISTEN txbox_outbox")
    for _ in range(3):  # with statements that are prepared already, too
        assert bench.take(handler) in ([Outcome.PROCESSED] * 5, [Outcome.DUPLICATE] * 5)
    assert list(listening.notifies(timeout=10.0, stop_after=1)), "no relay was woken"
    listening.close()
    staged = bench.raw.rows("SELECT cause_id, payload FROM txbox_outbox ORDER BY number")
    assert staged == [(message_id, body) for message_id in IDS for body in (b"1", b"2", b"3")]
    assert (
        bench.effects() == bench.effects([f"{message_id}-second" for message_id in IDS]) == [1] * 5
    )
    (mails,) = bench.raw.rows(
        "SELECT count(*), count(DISTINCT payload) FROM txbox_inbox WHERE status = 'pending'"
    )
    assert mails == (5, 5)


@pytest.mark.parametrize(
    ("ids", "frequent"),
    [(IDS, False), (IDS, True), (["m2"], False)],
    ids=["rare", "frequent", "alone"],
)
def test_a_stage_that_fails_later_is_its_own_messages_failure(
    bench: Bench, ids: list[str], frequent: bool
) -> None:
    bench.raw.execute("ALTER TABLE txbox_outbox ADD CONSTRAINT kind CHECK (type <> 'refused')")
    bench.app.publish(Local(), topics=["invoices"])

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        yield tx.execute(INSERT, (message.id,))
        kind = "refused" if message.id == "m2" else "paid"
        if bench.is_async:
            yield bench.app.outbox.stage_async(tx, "invoices", {}, type=kind)
        else:
            bench.app.outbox.stage(tx, "invoices", {}, type=kind)

    handler = bench.handler(writes)
    if frequent:
        bench.frequent_failures(handler)
    assert bench.take(handler, ids) == [
        Outcome.FAILED if message_id == "m2" else Outcome.PROCESSED for message_id in ids
    ]
    assert bench.effects(ids) == [0 if message_id == "m2" else 1 for message_id in ids]
    row = the_row(bench.raw, "m2")
    assert row.attempts == 1
    assert row.error is not None
    assert "23514" in row.error, "the server's own refusal"
    causes = [
        cause for (cause,) in bench.raw.rows("SELECT cause_id FROM txbox_outbox ORDER BY number")
    ]
    assert causes == [message_id for message_id in ids if message_id != "m2"]
    # and the statement is prepared again
    assert bench.take(handler, ["n0", "n1"]) == [Outcome.PROCESSED] * 2
    assert not [event for event in bench.events if isinstance(event, TransactionRetried)]


@pytest.mark.parametrize("frequent", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("before", [0, 31, 70])
def test_a_failure_among_many_statements_is_its_own_messages(
    bench: Bench, before: int, frequent: bool
) -> None:
    """Also when more was sent behind it, and behind a sync."""

    def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
        for number in range(100):
            fails = message.id == "m2" and number == before
            yield tx.execute(*((REFUSED, ("no number",)) if fails else (INSERT, (message.id,))))

    handler = bench.handler(writes)
    if frequent:
        bench.frequent_failures(handler)
    assert bench.take(handler) == [
        Outcome.FAILED if message_id == "m2" else Outcome.PROCESSED for message_id in IDS
    ]
    assert bench.effects() == [100, 100, 0, 100, 100]


def test_a_commit_is_never_put_off(bench: Bench) -> None:
    """What follows it, behind a sync, would be committed by itself."""

    def commits(message: Message[Any], tx: Any) -> Iterator[Any]:
        yield tx.execute(INSERT, (message.id,))
        with contextlib.suppress(psycopg.Error):
            yield tx.execute("COMMIT", ())
        for _ in range(500):
            yield tx.execute(INSERT, (message.id,))

    assert bench.take(bench.handler(commits), ["a"]) != [Outcome.PROCESSED]
    assert bench.effects(["a"]) == [0]


def test_a_swallowed_error_is_still_a_failure(bench: Bench) -> None:
    """The error that a later statement brings is caught; the transaction has failed all the same."""

    def swallows(message: Message[Any], tx: Any) -> None:
        tx.execute(INSERT, (message.id,))
        if message.id == "m2":
            with contextlib.suppress(psycopg.Error):
                tx.execute(REFUSED, ("no number",))
            with contextlib.suppress(psycopg.Error), tx.cursor() as cursor:
                cursor.execute("SELECT 1")

    if bench.is_async:
        pytest.skip("as sync")
    bench.app.handler(TOPIC, consumer=CONSUMER, pipeline=True)(swallows)
    (handler,) = bench.app.handlers.matching(TOPIC, None, CONSUMER)
    found = bench.take(handler)
    assert found == [
        Outcome.FAILED if message_id == "m2" else Outcome.PROCESSED for message_id in IDS
    ]
    assert bench.effects() == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("count", [1, 5], ids=["alone", "batch"])
@pytest.mark.parametrize("cut", ["before", "after"])
@pytest.mark.parametrize("way", ["url", "async-url"])
def test_a_commit_without_an_answer_is_decided(
    postgresql_url: str, way: str, cut: Cut, count: int
) -> None:
    """Statements, close and COMMIT leave together: what became of them is asked by claiming again."""
    with Proxy(postgresql_url) as proxy:
        bench = Bench(proxy.url, way)
        try:
            runs: list[str] = []

            def writes(message: Message[Any], tx: Any) -> Iterator[Any]:
                runs.append(str(message.id))
                yield tx.execute(INSERT, (message.id,))

            handler = bench.handler(writes)
            assert bench.take(handler, ["warm"]) == [Outcome.PROCESSED]
            proxy.cut = cut
            found = bench.take(handler, IDS[:count])
            assert proxy.cuts == 1
            ended = Outcome.PROCESSED if cut == "before" else Outcome.DUPLICATE
            assert found == [ended] * count
            assert bench.effects(IDS[:count]) == [1] * count
        finally:
            bench.close()
