"""A session that takes its connection from elsewhere would write where nothing is rolled back (promise 2.14)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_async

from tests.support.connections import engine_url
from tests.support.databases import Raw, names
from txbox import App, Inbox, Message, Outbox, Outcome
from txbox.admin import Admin
from txbox.errors import ConfigurationError

pytestmark = pytest.mark.every_database

DRIVERS = {"postgresql": "psycopg", "mysql": "pymysql", "sqlite": "pysqlite"}
ASYNC_DRIVERS = {"postgresql": "asyncpg", "mysql": "asyncmy", "sqlite": "aiosqlite"}


class Base(orm.DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True, autoincrement=False)
    balance: orm.Mapped[int]


#: Where sessions that choose for themselves go.
elsewhere: list[sa.Engine] = []


class Always(orm.Session):
    def get_bind(self, *_: Any, **__: Any) -> Any:
        return elsewhere[0]


class Writes(orm.Session):
    """SQLAlchemy's recipe for replicas, the wrong way round."""

    def get_bind(self, mapper: Any = None, clause: Any = None, **more: Any) -> Any:
        if self._flushing or isinstance(clause, (sa.Update, sa.Delete)):
            return elsewhere[0]
        return super().get_bind(mapper, clause=clause, **more)


class OfMapper(orm.Session):
    def get_bind(self, mapper: Any = None, **more: Any) -> Any:
        if mapper is not None and mapper.class_ is Account:
            return elsewhere[0]
        return super().get_bind(mapper, **more)


class Harmless(orm.Session):
    def get_bind(self, *args: Any, **more: Any) -> Any:
        return super().get_bind(*args, **more)


class WithBinds(orm.Session):
    def __init__(self, bind: Any = None, **more: Any) -> None:
        more["binds"] = {Account: elsewhere[0]}
        super().__init__(bind, **more)


def message() -> Message[Any]:
    return Message(id="1", topic="t", payload=b"{}")


@pytest.fixture
def other_url(tmp_path: Path) -> Iterator[str]:
    url = f"sqlite:///{tmp_path / 'other.db'}"
    engine = sa.create_engine(url)
    Base.metadata.create_all(engine)
    elsewhere.append(engine)
    yield url
    elsewhere.clear()
    engine.dispose()


@pytest.fixture(params=names())
def target_url(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> str:
    return new_database(request.param)


def adds(_message: Message[Any], tx: Any) -> None:
    tx.add(Account(id=1, balance=1))
    tx.commit()


async def adds_async(_message: Message[Any], tx: Any) -> None:
    tx.add(Account(id=1, balance=1))
    await tx.commit()


def accounts(url: str) -> int:
    with Raw(url) as raw:
        return int(raw.value("SELECT count(*) FROM account"))


REFUSED = [Always, Writes, WithBinds]


def engine_of(url: str) -> sa.Engine:
    return sa.create_engine(engine_url(url, DRIVERS[url.partition(":")[0]]))


@pytest.mark.parametrize("kind", REFUSED)
def test_a_session_that_chooses_its_connection_is_refused_before_anything_runs(
    target_url: str, other_url: str, kind: type[orm.Session]
) -> None:
    engine = engine_of(target_url)
    with App(orm.sessionmaker(engine, class_=kind)) as app:
        app.handler("t", consumer="c")(adds)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=kind.__name__):
                app.process(message())
        (finding,) = Admin(app).doctor().findings
        assert finding.problem.endswith("although the message fails.")
        assert finding.remedy.startswith("Use a sessionmaker without get_bind()")
    engine.dispose()
    assert accounts(other_url) == 0
    with Raw(target_url) as raw:
        assert raw.value("SELECT count(*) FROM txbox_inbox") == 0

    async def refused() -> None:
        engine = sa_async.create_async_engine(
            engine_url(target_url, ASYNC_DRIVERS[target_url.partition(":")[0]])
        )
        app = App(sa_async.async_sessionmaker(engine, sync_session_class=kind))
        app.handler("t", consumer="c")(adds_async)
        with pytest.raises(ConfigurationError, match=kind.__name__):
            await app.process_async(message())
        await app.close_async()
        await engine.dispose()

    asyncio.run(refused())
    assert accounts(other_url) == 0


def test_a_session_that_chooses_by_mapper_fails_before_it_writes(
    target_url: str, other_url: str
) -> None:
    engine = engine_of(target_url)
    with App(orm.sessionmaker(engine, class_=OfMapper)) as app:
        app.handler("t", consumer="c")(adds)
        assert app.process(message()) is Outcome.FAILED
    engine.dispose()
    assert accounts(other_url) == 0
    with Raw(target_url) as raw:
        assert "get_bind" in str(raw.value("SELECT error FROM txbox_inbox"))


def test_a_session_of_a_class_of_its_own_is_fine(target_url: str, other_url: str) -> None:
    engine = engine_of(target_url)
    Base.metadata.create_all(engine)
    with App(orm.sessionmaker(engine, class_=Harmless)) as app:
        app.handler("t", consumer="c")(adds)
        assert app.process(message()) is Outcome.PROCESSED
    with Harmless(engine) as session, session.begin():
        assert Inbox(consumer="d").accept(session, "1")
    engine.dispose()
    assert accounts(target_url) == 1
    assert accounts(other_url) == 0


@pytest.mark.parametrize("kind", [Writes, WithBinds])
def test_a_callers_session_of_two_engines_is_refused(
    target_url: str, other_url: str, kind: type[orm.Session]
) -> None:
    engine = engine_of(target_url)
    for session in (kind(engine), orm.scoped_session(orm.sessionmaker(engine, class_=kind))):
        with pytest.raises(ConfigurationError, match="no single engine"):
            Inbox(consumer="c").accept(session, "1")
        with pytest.raises(ConfigurationError, match="no single engine"):
            Outbox().stage(session, "t", {})
        session.close()
    engine.dispose()
