"""P19 and P20: what a handler's `stage` costs it, and `accept` in a loop of one's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psycopg

from benchmarks.contender import Txbox
from benchmarks.place import Place
from benchmarks.result import Bar, Round, Verified, ratios
from benchmarks.setting import Cell, Setting
from benchmarks.source import Stopwatch
from benchmarks.workload import CONSUMER, TOPIC, Delivery, Tx, Work, create_inbox, reads, writes
from txbox.app import App
from txbox.brokers.local import Local
from txbox.inbox import Inbox
from txbox.message import Message

_STAGED = "invoices"


class Staging(Txbox):
    """A handler that also stages a message. Nobody sends it, so its row is there to be counted."""

    def __init__(self, on: Setting, name: str, handler: Callable[..., Any], **options: Any) -> None:
        def stages(message: Message[dict[str, Any]], tx: Tx) -> None:
            handler(message, tx)
            self.app.outbox.stage(tx, _STAGED, {"order": message.body["order"]})

        super().__init__(name, on.place, on.gauges, stages, **options)
        self.app.publish(Local(), topics=[_STAGED])

    def off_by(self, connection: Tx, work: Work) -> int:
        staged = _count(connection, "txbox_outbox")
        return super().off_by(connection, work) + abs(staged - work.distinct)


def _count(connection: Tx, table: str) -> int:
    row = connection.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
    assert row is not None
    return int(row[0])


def p19(on: Setting) -> dict[str, Any]:
    kinds: list[tuple[str, float, int, Callable[..., Any], dict[str, Any]]] = [
        ("ordinary handler", 1.6, 3, reads, {}),
        ("pipeline=True", 2.0, 5, writes, {"pipeline": True}),
    ]
    pairs = [
        (on.txbox(name, handler, **options), Staging(on, f"{name}, stages", handler, **options))
        for name, _, _, handler, options in kinds
    ]
    cells: list[Cell] = [
        (contender, on.work(times))
        for pair, (_, _, times, _, _) in zip(pairs, kinds, strict=True)
        for contender in pair
    ]
    rounds = on.interleaved(cells)
    return on.result(
        "P19",
        "A handler that stages a message",
        "the whole workload waiting from the start, one worker with one lane; the handlers of P2 and P3, alone and "
        "with an `app.outbox.stage` of a small body behind them. The staged rows are counted; nobody sends them",
        [
            Bar(
                f"{staging.name}: at most {most} times its time without",
                most,
                ratios(rounds, plain.name, staging.name),
                "at most",
            )
            for (plain, staging), (_, most, _, _, _) in zip(pairs, kinds, strict=True)
        ],
        rounds,
    )


# -- accept -----------------------------------------------------------------------------------

_BY_HAND = (
    "INSERT INTO inbox (consumer, message_id) VALUES (%s, %s) "
    "ON CONFLICT DO NOTHING RETURNING message_id"
)
_INBOX = Inbox(CONSUMER)


def _insert(tx: Tx, delivery: Delivery) -> None:
    tx.execute(_BY_HAND, (CONSUMER, delivery.id)).fetchone()
    tx.commit()


def _accept(tx: Tx, delivery: Delivery) -> None:
    _INBOX.accept(tx, Message(topic=TOPIC, id=delivery.id, payload=delivery.payload))
    tx.commit()


async def _insert_async(tx: psycopg.AsyncConnection[Any], delivery: Delivery) -> None:
    await (await tx.execute(_BY_HAND, (CONSUMER, delivery.id))).fetchone()
    await tx.commit()


async def _accept_async(tx: psycopg.AsyncConnection[Any], delivery: Delivery) -> None:
    message = Message(topic=TOPIC, id=delivery.id, payload=delivery.payload)
    await _INBOX.accept_async(tx, message)
    await tx.commit()


class Loop:
    """A loop on one connection that writes an inbox row for each delivery and commits it, and does nothing else.

    Args:
        place: its tables; txbox's own, or those beside.
        take: writes the row and commits.
        take_async: the same on an async connection; one of both.
    """

    def __init__(
        self,
        on: Setting,
        name: str,
        place: Place,
        take: Callable[[Tx, Delivery], None] | None = None,
        take_async: Callable[[Any, Delivery], Awaitable[None]] | None = None,
    ) -> None:
        self.name = name
        self._on = on
        self._place = place
        self._take = take
        self._take_async = take_async
        self._table = "txbox_inbox" if place is on.place else "inbox"

    def round(self, work: Work) -> Round:
        place = self._place
        if self._table == "txbox_inbox":
            with App(place.url) as app:
                app.init()
        else:
            with place.connect() as admin:
                create_inbox(admin)
        place.prepare()
        watch = Stopwatch(self._on.gauges)
        if self._take is not None:
            self._run(self._take, work, watch)
        if self._take_async is not None:
            asyncio.run(self._run_async(self._take_async, work, watch))
        with place.connect() as admin:
            rows = _count(admin, self._table)
        verified = Verified(max(0, work.distinct - rows), max(0, rows - work.distinct))
        return watch.round(self.name, verified, dead_tuples=place.dead_tuples())

    def _run(self, take: Callable[[Tx, Delivery], None], work: Work, watch: Stopwatch) -> None:
        clock, took = time.perf_counter, watch.took_s
        with psycopg.connect(self._place.url) as tx:
            last = watch.start()
            for delivery in work.deliveries:
                take(tx, delivery)
                now = clock()
                took.append(now - last)
                last = now
            watch.stop()

    async def _run_async(
        self, take: Callable[[Any, Delivery], Awaitable[None]], work: Work, watch: Stopwatch
    ) -> None:
        clock, took = time.perf_counter, watch.took_s
        async with await psycopg.AsyncConnection.connect(self._place.url) as tx:
            last = watch.start()
            for delivery in work.deliveries:
                await take(tx, delivery)
                now = clock()
                took.append(now - last)
                last = now
            watch.stop()


def p20(on: Setting) -> dict[str, Any]:
    pairs = [
        (
            Loop(on, "INSERT by hand", on.beside, _insert),
            Loop(on, "accept", on.place, _accept),
        ),
        (
            Loop(on, "INSERT by hand, async", on.beside, take_async=_insert_async),
            Loop(on, "accept_async", on.place, take_async=_accept_async),
        ),
    ]
    work = on.work(duplicates=0.0)
    rounds = on.interleaved([(loop, work) for pair in pairs for loop in pair])
    return on.result(
        "P20",
        "accept in a loop of one's own",
        "BEGIN, the inbox row, COMMIT, and nothing else: `accept` of a message with its payload against the INSERT of "
        "two columns that a textbook has, each on one psycopg connection, no duplicates",
        [
            Bar(
                f"{accepting.name}: at least 0.85 of an INSERT by hand",
                0.85,
                ratios(rounds, accepting.name, by_hand.name),
            )
            for by_hand, accepting in pairs
        ],
        rounds,
    )
