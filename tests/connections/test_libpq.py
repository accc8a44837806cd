"""What goes through libpq: prepared commands, and values in PostgreSQL's text format as psycopg writes them."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import pq
from psycopg.adapt import PyFormat, Transformer
from psycopg_pool import ConnectionPool

from tests.support.databases import NewDatabase
from txbox import App, Message, Outcome
from txbox.connections import open_database
from txbox.connections.libpq import BEGIN, COMMIT, Pipeline, _dump, _int_arrays, _Sent  # pyright: ignore[reportPrivateUsage]
from txbox.session import Session, Statement, drive


@pytest.mark.parametrize(
    ("values", "written"),
    [
        ([], "{}"),
        ([None], "{NULL}"),
        ([None, None], "{NULL,NULL}"),
        (["a", "b"], '{"a","b"}'),
        (["a", "a"], '{"a","a"}'),
        (["NULL", ""], '{"NULL",""}'),
        (["a", None, "b"], '{"a",NULL,"b"}'),
        ([None, "a"], '{NULL,"a"}'),
        (["a,b", "{c}"], '{"a,b","{c}"}'),
        (['a","b', "c"], r'{"a\",\"b","c"}'),
        (["a", '"'], r'{"a","\""}'),
        (['"', '"'], r'{"\"","\""}'),
        (["\\", "a"], r'{"\\","a"}'),
        (["é", "\N{GRINNING FACE}"], '{"é","\N{GRINNING FACE}"}'),
        ([b"\x00", b"\xff"], r'{"\\x00","\\xff"}'),
        ([b"", b""], r'{"\\x","\\x"}'),
        ([b"a", None], r'{"\\x61",NULL}'),
        ([1, 2, None], "{1,2,NULL}"),
        ([3, 3], "{3,3}"),
    ],
)
def test_columns_of_many_rows(values: list[Any], written: str) -> None:
    assert _dump(values) == written.encode()


_EDGES = [edge + step for edge in (0, 2**15, 2**31, 2**63) for step in (-2, -1, 0, 1)]
_numbers = st.one_of(
    st.integers(),
    st.sampled_from(_EDGES),
    st.sampled_from([-edge for edge in _EDGES]),
    st.booleans(),
    st.none(),
)


@given(st.lists(st.lists(_numbers, min_size=1, max_size=4), min_size=1, max_size=3))
def test_int_arrays_are_those_of_psycopg(params: list[list[int | None]]) -> None:
    arrays = _int_arrays(params)
    plain = all(type(number) is int for numbers in params for number in numbers)
    if arrays is None:
        fits = all(
            -(2**63) <= number < 2**63
            for numbers in params
            for number in numbers
            if number is not None
        )
        assert not (plain and fits), "what is plain goes the short way"
        return
    assert plain
    transformer = Transformer()
    values = transformer.dump_sequence(params, [PyFormat.AUTO] * len(params))
    assert arrays == ([bytes(value or b"") for value in values], transformer.types)


def _prepared(tx: Any) -> set[str]:
    found = tx.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'txbox%'")
    return {re.sub(r"_[0-9a-f]{12}_|\d+$", "_", name) for (name,) in found.fetchall()}


@pytest.fixture
def pool(new_database: NewDatabase) -> Iterator[ConnectionPool[Any]]:
    with ConnectionPool(new_database("postgresql"), min_size=1, max_size=1, open=True) as one:
        yield one


def _one(message_id: str) -> Message[Any]:
    return Message(id=message_id, topic="orders", payload=b"{}")


def test_begin_and_commit_are_prepared(pool: ConnectionPool[Any]) -> None:
    app, seen = App(pool), list[set[str]]()

    @app.handler("orders", consumer="billing")
    def bill(message: Message[Any], tx: Any) -> None:
        seen.append(_prepared(tx))

    assert [app.process(_one(each)) for each in "abc"] == [Outcome.PROCESSED] * 3
    assert seen[-1] == {"txbox__", "txbox_BEGIN__", "txbox_COMMIT__"}


def test_plans_that_others_deallocated_are_prepared_again(pool: ConnectionPool[Any]) -> None:
    """psycopg does this when its user rolls back; nothing is tried again or counted because of it."""
    events: list[Any] = []
    app = App(pool, observers=[events.append])

    @app.handler("orders", consumer="billing")
    def bill(message: Message[Any], tx: Any) -> None: ...

    for message_id in "abc":
        assert app.process(_one(message_id)) is Outcome.PROCESSED
        with pool.connection() as other:
            other.execute("DEALLOCATE ALL")
    assert {type(event).__name__ for event in events} <= {
        "MessageProcessed",
        "TransactionCommitted",
    }


def test_a_statement_alone_is_prepared_again_too(pool: ConnectionPool[Any]) -> None:
    connections = open_database(pool).sync
    assert connections is not None
    read = Statement("one", "SELECT 1", {})
    for _ in range(2):
        assert drive(connections, Session.alone, read).rows == [(1,)]
        with pool.connection() as other:
            other.execute("DEALLOCATE ALL")


def test_a_connection_that_the_pool_has_closed_is_forgotten(pool: ConnectionPool[Any]) -> None:
    connections = open_database(pool).sync
    assert connections is not None
    seen: list[weakref.ref[Any]] = []
    for _ in range(3):
        drive(connections, Session.alone, Statement("one", "SELECT 1", {}))
        with pool.connection() as raw:
            seen.append(weakref.ref(raw))
        del raw
        pool.drain()
        pool.wait()
    gc.collect()
    # the last one until the next one is used
    assert [ref() is None for ref in seen] == [True, True, False]


def test_a_handler_that_deallocates_every_plan_is_run_again(pool: ConnectionPool[Any]) -> None:
    app, runs = App(pool), list[str]()

    @app.handler("orders", consumer="billing")
    def bill(message: Message[Any], tx: Any) -> None:
        runs.append(str(message.id))
        if len(runs) == 3:
            tx.execute("DEALLOCATE ALL")

    assert [app.process(_one(each)) for each in "abcd"] == [Outcome.PROCESSED] * 4
    assert runs == ["a", "b", "c", "c", "d"]


def test_a_commit_whose_plan_the_server_lost_is_not_in_doubt(pool: ConnectionPool[Any]) -> None:
    """A COMMIT behind statements that are all prepared on the way is sent as text, because its plan may be gone."""
    with pool.connection() as raw:
        pipeline = Pipeline(raw, prepare=True, translate=lambda _: None)
        one, two = Statement("one", "SELECT 1", {}), Statement("two", "SELECT 2", {})

        def transaction(statement: Statement) -> None:
            raw.wait(pipeline.send((), before=BEGIN))
            raw.wait(pipeline.send((statement,), after=COMMIT))

        transaction(one)
        transaction(one)
        assert "txbox_COMMIT__" in _prepared(raw)
        raw.commit()
        raw.wait(pipeline.send((), before=BEGIN))
        raw.execute("DEALLOCATE ALL")
        raw.wait(pipeline.send((two,), after=COMMIT))


def test_an_end_that_follows_the_answer_of_a_commit_says_nothing_of_it(
    pool: ConnectionPool[Any],
) -> None:
    """A server that shuts down may end the connection between a COMMIT and the sync behind it."""
    with pool.connection() as raw:
        answer = raw.pgconn.make_empty_result
        fine, ended = answer(pq.ExecStatus.COMMAND_OK), answer(pq.ExecStatus.FATAL_ERROR)
        pipeline = Pipeline(raw, prepare=True, translate=lambda _: None)
        sent = _Sent((), BEGIN, COMMIT)
        sent.opening = sent.closing = 1
        definite = [
            pipeline._failure(sent, answers).definite
            for answers in ([ended], [fine, ended], [fine, fine, ended])
        ]
    assert definite == [True, False, False]


def test_the_plans_of_two_connections_have_different_names(new_database: NewDatabase) -> None:
    """A pooler that mixes up its clients' plans runs no other statement than the one that was meant."""
    url, names = new_database("postgresql"), list[set[str]]()
    for _ in range(2):
        connection: Any = psycopg.connect(url)
        with connection as raw:
            pipeline = Pipeline(raw, prepare=True, translate=lambda _: None)
            raw.wait(pipeline.send((Statement("one", "SELECT 1", {}),), before=BEGIN))
            found = raw.execute("SELECT name FROM pg_prepared_statements").fetchall()
            names.append({name for (name,) in found})
    assert len(names[0]) == len(names[1]) == 2
    assert names[0].isdisjoint(names[1])


def test_a_commit_is_prepared_for_each_plan_it_comes_behind(pool: ConnectionPool[Any]) -> None:
    """Behind a pooler two plans may be on two servers; a COMMIT uses a plan that is where its statement is."""
    with pool.connection() as raw:
        pipeline = Pipeline(raw, prepare=True, translate=lambda _: None)
        for sql in ("SELECT 1", "SELECT 2"):
            for _ in range(2):
                raw.wait(pipeline.send((), before=BEGIN))
                raw.wait(pipeline.send((Statement("any", sql, {}),), after=COMMIT))
        found = raw.execute("SELECT name FROM pg_prepared_statements WHERE statement = 'COMMIT'")
        assert len(found.fetchall()) == 2
