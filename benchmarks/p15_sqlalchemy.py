"""P15: SQLAlchemy with a backlog, Core and ORM, each beside its own textbook loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.dialects.postgresql import insert

from benchmarks.measure import circumstances
from benchmarks.naive_variants import (
    Consume,
    Contender,
    Looped,
    PostgresqlShop,
    Worked,
    interleaved,
)
from benchmarks.place import Gauges, places
from benchmarks.result import Bar, Plot, ratios, result, summary
from benchmarks.servers import fresh_database
from benchmarks.workload import CONSUMER, Delivery
from txbox import App, Message

NUMBER = "P15"
TITLE = "SQLAlchemy: Core and ORM with a backlog"

Body = Mapping[str, Any]


class Base(orm.DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True, autoincrement=False)
    balance: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(sa.BigInteger, sa.Identity(), primary_key=True)
    number: orm.Mapped[int] = orm.mapped_column(sa.BigInteger)
    account: orm.Mapped[int]
    amount: orm.Mapped[int]


_INBOX = sa.table("inbox", sa.column("consumer"), sa.column("message_id"))
_accounts, _orders = Base.metadata.tables["account"], Base.metadata.tables["orders"]
# built once: what SQLAlchemy makes of a statement is then found in its cache without building it again
_CLAIM = (
    insert(_INBOX)
    .values(consumer=sa.bindparam("consumer"), message_id=sa.bindparam("message_id"))
    .on_conflict_do_nothing()
    .returning(_INBOX.c.message_id)
)
_PAY = (
    sa.update(_accounts)
    .where(_accounts.c.id == sa.bindparam("account"))
    .values(balance=_accounts.c.balance + sa.bindparam("amount"))
)
_ORDER = (
    sa.insert(_orders)
    .inline()
    .values(
        number=sa.bindparam("order"), account=sa.bindparam("account"), amount=sa.bindparam("amount")
    )
)
_PAY_BY_ENTITY = (
    sa.update(Account)
    .where(Account.id == sa.bindparam("account"))
    .values(balance=Account.balance + sa.bindparam("amount"))
    .execution_options(synchronize_session=False)
)
_ACCOUNTS_OF = (
    sa.select(Account)
    .where(Account.id.in_(sa.bindparam("ids", expanding=True)))
    .order_by(Account.id)
    .with_for_update()
)


def _given(body: Body) -> dict[str, Any]:
    return {name: body[name] for name in ("order", "account", "amount")}


# -- handlers ---------------------------------------------------------------------------------


def core(body: Body, connection: sa.Connection) -> None:
    given = _given(body)
    connection.execute(_PAY, given)
    connection.execute(_ORDER, given)


def core_many(bodies: Sequence[Body], connection: sa.Connection) -> None:
    given = [_given(body) for body in bodies]
    connection.execute(_PAY, given)
    connection.execute(_ORDER, given)


def entities(body: Body, session: orm.Session) -> None:
    session.execute(_PAY_BY_ENTITY, {"account": body["account"], "amount": body["amount"]})
    session.add(Order(number=body["order"], account=body["account"], amount=body["amount"]))


def entities_many(bodies: Sequence[Body], session: orm.Session) -> None:
    wanted = sorted({body["account"] for body in bodies})
    accounts = {account.id: account for account in session.scalars(_ACCOUNTS_OF, {"ids": wanted})}
    for body in bodies:
        accounts[body["account"]].balance += body["amount"]
    session.add_all(
        Order(number=body["order"], account=body["account"], amount=body["amount"])
        for body in bodies
    )


def _one(
    handle: Callable[[Body, Any], None],
) -> Callable[[Message[dict[str, Any]], Any], None]:
    return lambda message, tx: handle(message.body, tx)


def _many(
    handle: Callable[[Sequence[Body], Any], None],
) -> Callable[[list[Message[dict[str, Any]]], Any], None]:
    return lambda messages, tx: handle([message.body for message in messages], tx)


# -- the textbook -----------------------------------------------------------------------------


@contextmanager
def _naive_core(engine: sa.Engine) -> Generator[Consume]:
    with engine.connect() as connection:

        def consume(delivery: Delivery) -> None:
            claimed = connection.execute(
                _CLAIM, {"consumer": CONSUMER, "message_id": delivery.id}
            ).first()
            if claimed is not None:
                core(json.loads(delivery.payload), connection)
            connection.commit()

        yield consume


@contextmanager
def _naive_orm(engine: sa.Engine) -> Generator[Consume]:
    maker = orm.sessionmaker(engine)

    def consume(delivery: Delivery) -> None:
        with maker.begin() as session:
            claimed = session.execute(
                _CLAIM, {"consumer": CONSUMER, "message_id": delivery.id}
            ).first()
            if claimed is not None:
                entities(json.loads(delivery.payload), session)

    yield consume


def run(*, rounds: int, messages: int) -> dict[str, Any]:
    """Measure, in interleaved rounds; returns the result as it is stored.

    Args:
        rounds: of each contender, 1 or more.
        messages: distinct ones in each round of the textbook loops.
    """
    with fresh_database("sqlalchemy") as url, places(url) as (place, beside):
        gauge = Gauges(url)
        engines = [_engine(place.url), _engine(beside.url)]
        ours, theirs = PostgresqlShop(place), PostgresqlShop(beside)
        maker = orm.sessionmaker(engines[0], autoflush=False)

        def txbox(name: str, target: Any, handler: Any, **options: Any) -> Worked:
            return Worked(f"txbox, {name}", ours, gauge, App(target), handler, **options)

        cells: list[tuple[Contender, float]] = [
            (Looped("naive Core", theirs, gauge, lambda: _naive_core(engines[1])), 1),
            (txbox("Core, ordinary handler", engines[0], _one(core)), 2),
            (txbox("Core, batch=True", engines[0], _many(core_many), batch=True), 8),
            (Looped("naive ORM", theirs, gauge, lambda: _naive_orm(engines[1])), 0.5),
            (txbox("ORM, ordinary handler", maker, _one(entities)), 1),
            (txbox("ORM, batch=True, one flush", maker, _many(entities_many), batch=True), 4),
        ]  # fmt: skip
        try:
            done = interleaved(cells, rounds=rounds, messages=messages)
        finally:
            for contender, _ in cells:
                contender.close()
            for engine in engines:
                engine.dispose()
            gauge.close()
        core_pairs = ratios(done, "txbox, Core, batch=True", "naive Core")
        orm_pairs = ratios(done, "txbox, ORM, batch=True, one flush", "naive ORM")
        lines = {name: [(0.0, medians["rate"])] for name, medians in summary(done).items()}
        return result(
            phase=NUMBER,
            title=TITLE,
            method=f"{rounds} rounds of each, in turns, the whole workload waiting from the start, one connection "
            "each; statements of the Core handlers and loops are built once; the textbook loops are INSERT … ON "
            "CONFLICT DO NOTHING RETURNING, handler, COMMIT; batch=True gives the list to connection.execute, or "
            "loads the accounts by one SELECT … FOR UPDATE and flushes once",
            bars=[
                Bar("Core, list-execute: 10 times its own naive", 10.0, core_pairs),
                Bar("ORM, one flush a batch: 8 times its own naive", 8.0, orm_pairs),
            ],
            rounds=done,
            circumstances=circumstances(url),
            plots=[
                Plot("p15", "SQLAlchemy, backlog", "bars", "", "messages a second", lines)
            ],
            notes=[f"SQLAlchemy {sa.__version__} on psycopg."],
        )  # fmt: skip


def _engine(url: str) -> sa.Engine:
    return sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://", 1))
