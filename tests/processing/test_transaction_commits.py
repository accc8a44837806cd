"""A COMMIT whose answer is lost (promises 2.6, 2.7): no failure recorded, doubt decided by claiming again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.databases import NewDatabase, Raw, names
from tests.support.proxy import Cut, Proxy
from tests.support.shop import AT_ONCE, CONSUMER, TOPIC, Shop, create_effects, paid, statuses
from txbox import App, Message, Outcome
from txbox.events import ConsumptionPaused, Event, MessageDead, MessageFailed, MessageProcessed

pytestmark = pytest.mark.every_database

SERVERS = names("postgresql", "mysql")
CUTS: tuple[Cut, ...] = ("before", "after")
by_cut = pytest.mark.parametrize("cut", CUTS)
by_server = pytest.mark.parametrize("product", SERVERS)


@contextmanager
def behind_proxy(url: str) -> Iterator[tuple[Shop, Proxy]]:
    events: list[Event] = []
    with Raw(url) as raw, Proxy(url) as proxy, App(proxy.url, observers=[events.append]) as app:
        create_effects(raw)
        yield Shop(url, raw, app, events), proxy


def check_nothing_counted(shop: Shop) -> None:
    assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 0
    assert shop.emitted(MessageFailed) == shop.emitted(MessageDead) == []


@by_server
@by_cut
def test_ambiguous_commit_of_a_delivery(new_database: NewDatabase, product: str, cut: Cut) -> None:
    with behind_proxy(new_database(product)) as (shop, proxy):
        shop.handler()
        assert shop.deliver(paid("before")) is Outcome.PROCESSED
        proxy.cut = cut
        outcome = shop.deliver(paid("a"))
        assert proxy.cuts == 1
        # lost before the server: it is processed again. Lost after: the claim finds it processed
        assert outcome is (Outcome.PROCESSED if cut == "before" else Outcome.DUPLICATE)
        assert shop.calls.count("a") == (2 if cut == "before" else 1)
        assert shop.effects("a") == 1
        assert (shop.row("a").status, shop.row("a").attempts) == ("processed", 0)
        check_nothing_counted(shop)
        assert shop.deliver(paid("a")) is Outcome.DUPLICATE


@by_server
@by_cut
def test_ambiguous_commit_of_leased_work(new_database: NewDatabase, product: str, cut: Cut) -> None:
    with behind_proxy(new_database(product)) as (shop, proxy):
        shop.handler(mode="stored")
        assert shop.deliver(paid("a")) is Outcome.DEFERRED
        ((leased, token),) = shop.lease()
        proxy.cut = cut
        outcome = shop.run(leased, token)
        assert proxy.cuts == 1
        if cut == "after":
            # the fenced release matched nothing: the work is done
            assert outcome is Outcome.PROCESSED
            assert len(shop.emitted(MessageProcessed)) == 1
        else:
            assert outcome is Outcome.DEFERRED  # given back, with its start
            assert (shop.row("a").status, shop.row("a").starts) == ("pending", 0)
            shop.make_due()
            assert shop.work() == [Outcome.PROCESSED]
        assert shop.effects("a") == 1
        assert (shop.row("a").status, shop.row("a").attempts) == ("processed", 0)
        check_nothing_counted(shop)


@by_server
@by_cut
def test_ambiguous_commit_of_a_recorded_failure(
    new_database: NewDatabase, product: str, cut: Cut
) -> None:
    """The failure is recorded once, whichever way the COMMIT of its record went."""
    with behind_proxy(new_database(product)) as (shop, proxy):
        cuts: list[Cut] = [cut]

        def fails(message: Message[Any], tx: Any) -> None:
            if message.id == "a" and message.attempt == 1:
                proxy.cut = cuts.pop() if cuts else None
                raise ValueError("the proxy waits for its record")

        shop.handler(fails)
        assert shop.deliver(paid("before")) is Outcome.PROCESSED
        outcome = shop.deliver(paid("a"))
        assert proxy.cuts == 1
        # lost after the server: the row is met, and the table owns it
        assert outcome is (Outcome.FAILED if cut == "before" else Outcome.DEFERRED)
        row = shop.row("a")
        assert (row.status, row.attempts, row.has_payload) == ("failed", 1, True)
        assert shop.raw.value("SELECT count(*) FROM txbox_attempt") == 1
        assert shop.work() == [Outcome.PROCESSED]
        assert shop.effects("a") == 1


@by_server
@by_cut
def test_ambiguous_commit_of_stored_messages(
    new_database: NewDatabase, product: str, cut: Cut
) -> None:
    with behind_proxy(new_database(product)) as (shop, proxy):
        shop.handler(mode="stored")
        assert shop.deliver(paid("before")) is Outcome.DEFERRED
        proxy.cut = cut
        assert shop.deliver(paid("a")) is Outcome.DEFERRED
        assert proxy.cuts == 1
        assert len(shop.emitted(ConsumptionPaused)) == 1
        assert statuses(shop.raw) == {"pending": 2}


KINDS = [
    (product, kind, scheme)
    for dialect, kind, scheme in (
        ("postgresql", "asyncpg", "postgresql+asyncpg:"),
        ("postgresql", "psycopg", "postgresql:"),
        ("mysql", "asyncmy", "mysql:"),
    )
    for product in names(dialect)
]


@pytest.mark.parametrize(("product", "kind", "scheme"), KINDS)
@by_cut
def test_ambiguous_commit_by_async_drivers(
    new_database: NewDatabase, product: str, kind: str, scheme: str, cut: Cut
) -> None:
    url = new_database(product)
    calls = []
    events: list[Event] = []

    async def run(proxy: Proxy) -> Outcome:
        async with App(scheme + proxy.url.partition(":")[2], observers=[events.append]) as app:

            @app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE)
            async def handle(message: Message[Any], tx: Any) -> None:
                calls.append(message.id)
                sql = f"INSERT INTO effect (message_id, note) VALUES ('{message.id}', '')"
                if kind == "asyncmy":
                    async with tx.cursor() as cursor:
                        await cursor.execute(sql)
                else:
                    await tx.execute(sql)

            assert await app.process_async(paid("before")) is Outcome.PROCESSED
            proxy.cut = cut
            return await app.process_async(paid("a"))

    with Raw(url) as raw, Proxy(url) as proxy:
        create_effects(raw)
        outcome = asyncio.run(run(proxy))
        assert proxy.cuts == 1
        assert outcome is (Outcome.PROCESSED if cut == "before" else Outcome.DUPLICATE)
        assert calls.count("a") == (2 if cut == "before" else 1)
        assert raw.value("SELECT count(*) FROM effect") == 2
        assert statuses(raw) == {"processed": 2}
        assert raw.value("SELECT count(*) FROM txbox_attempt") == 0


@by_server
@by_cut
def test_ambiguous_commit_by_an_engine(new_database: NewDatabase, product: str, cut: Cut) -> None:
    url = new_database(product)
    with Raw(url) as raw, Proxy(url) as proxy:
        create_effects(raw)
        driver = "psycopg" if product == "postgresql" else "pymysql"
        scheme, _, rest = proxy.url.partition(":")
        engine = sa.create_engine(f"{scheme}+{driver}:{rest}")
        app = App(engine)

        @app.handler(TOPIC, consumer=CONSUMER, retry=AT_ONCE)
        def handle(message: Message[Any], tx: sa.Connection) -> None:
            tx.execute(
                sa.text("INSERT INTO effect (message_id, note) VALUES (:own, '')"),
                {"own": message.id},
            )

        assert app.process(paid("before")) is Outcome.PROCESSED
        proxy.cut = cut
        outcome = app.process(paid("a"))
        assert proxy.cuts == 1
        assert outcome is (Outcome.PROCESSED if cut == "before" else Outcome.DUPLICATE)
        assert raw.value("SELECT count(*) FROM effect") == 2
        assert statuses(raw) == {"processed": 2}
        assert raw.value("SELECT count(*) FROM txbox_attempt") == 0
        engine.dispose()
