"""Workers of Celery, Dramatiq and taskiq over one ledger; the first COMMIT in a worker may be its last.

`python -m tests.support.task_queues celery` works until it is killed. The environment names the servers and the files.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import signal
import sqlite3
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import aiosqlite
import dramatiq
import redis
from celery import Celery
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from redis.asyncio import Redis as AsyncRedis
from taskiq import AckableMessage, AsyncBroker, AsyncResultBackend, BrokerMessage, TaskiqResult
from taskiq.api import run_receiver_task

from txbox import Inbox
from txbox.integrations import celery as with_celery
from txbox.integrations import dramatiq as with_dramatiq
from txbox.integrations import taskiq as with_taskiq

ADDED = "INSERT INTO ledger VALUES (?)"


@dataclass(frozen=True, slots=True)
class Setting:
    """Where the tasks of one test live.

    Attributes:
        name: of its queues.
        deadly: while this file exists, the next commit kills its process before anybody is told.
    """

    database: str
    name: str
    deadly: str
    rabbitmq: str
    redis: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Setting:
        names = ("DATABASE", "NAME", "DEADLY", "RABBITMQ", "REDIS")
        return cls(*(environment[f"QUEUES_{name}"] for name in names))

    @property
    def environment(self) -> dict[str, str]:
        return {
            "QUEUES_DATABASE": self.database, "QUEUES_NAME": self.name, "QUEUES_DEADLY": self.deadly,
            "QUEUES_RABBITMQ": self.rabbitmq, "QUEUES_REDIS": self.redis,
        }  # fmt: skip

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.database, timeout=30)) as connection:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                yield connection
            self._die()

    @asynccontextmanager
    async def transaction_async(self) -> AsyncIterator[aiosqlite.Connection]:
        async with aiosqlite.connect(self.database, timeout=30) as connection:
            await connection.execute("BEGIN IMMEDIATE")
            yield connection
            await connection.commit()
            self._die()

    def _die(self) -> None:
        with suppress(FileNotFoundError):
            pathlib.Path(self.deadly).unlink()
            os.kill(os.getpid(), signal.SIGKILL)


class CeleryShop:
    """`pay` adds to the ledger and doubles; `total` adds what it is given."""

    def __init__(self, setting: Setting) -> None:
        self.app: Any = Celery(
            "shop", broker=setting.rabbitmq, backend=setting.redis, set_as_current=False
        )
        self.app.conf.update(
            task_default_queue=setting.name,
            task_acks_late=True,
            task_reject_on_worker_lost=True,
            worker_prefetch_multiplier=1,
            result_backend_transport_options={"global_keyprefix": setting.name},
        )

        @self.app.task(name="pay", shared=False)
        @with_celery.once(Inbox(consumer="pay"), setting.transaction)
        def pay(tx: sqlite3.Connection, amount: int) -> int:
            tx.execute(ADDED, (amount,))
            return amount * 2

        @self.app.task(name="total", shared=False)
        @with_celery.once(Inbox(consumer="total"), setting.transaction)
        def total(tx: sqlite3.Connection, amounts: list[int] | int) -> int:
            return sum(amounts) if isinstance(amounts, list) else amounts

        # celery has no types
        self.pay: Any = pay
        self.total: Any = total

    def work(self) -> None:
        self.app.worker_main(["worker", "--pool=solo", "--loglevel=WARNING", "--without-mingle"])


class DramatiqShop:
    """`pay` adds to the ledger and doubles; `total` keeps what it is given."""

    def __init__(self, setting: Setting) -> None:
        # a dead worker's messages are back in the queue after a second
        untyped: Any = RedisBroker
        self.broker: Any = untyped(
            url=setting.redis, namespace=setting.name, heartbeat_timeout=1_000,
            maintenance_chance=1_000_000,
        )  # fmt: skip
        self.backend = RedisBackend(client=redis.Redis.from_url(setting.redis, socket_timeout=None))
        self.broker.add_middleware(CurrentMessage())
        results: Any = Results
        self.broker.add_middleware(results(backend=self.backend))

        @dramatiq.actor(broker=self.broker, actor_name="pay", store_results=True)
        @with_dramatiq.once(Inbox(consumer="pay"), setting.transaction)
        def pay(tx: sqlite3.Connection, amount: int) -> int:
            tx.execute(ADDED, (amount,))
            return amount * 2

        @dramatiq.actor(broker=self.broker, actor_name="total", store_results=True)
        @with_dramatiq.once(Inbox(consumer="total"), setting.transaction)
        def total(tx: sqlite3.Connection, amount: int) -> int:
            tx.execute(ADDED, (amount,))
            return amount

        self.pay, self.total = pay, total

    def work(self) -> None:
        dramatiq.Worker(self.broker, worker_threads=1, worker_timeout=100).start()
        threading.Event().wait()


class _Lists(AsyncBroker):
    """Tasks in a list of Redis; what is taken stays in another one until it is acknowledged."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.result_backend = _Kept(setting)
        self._waiting, self._taken = f"{setting.name}:waiting", f"{setting.name}:taken"
        self._redis: Any = AsyncRedis.from_url(setting.redis, socket_timeout=None)

    async def shutdown(self) -> None:
        await super().shutdown()
        await self._redis.aclose()

    async def kick(self, message: BrokerMessage) -> None:
        await self._redis.lpush(self._waiting, message.message)

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        # of a worker that died
        while await self._redis.lmove(self._taken, self._waiting, "RIGHT", "RIGHT"):
            pass
        while True:
            data = await self._redis.blmove(self._waiting, self._taken, 5, "RIGHT", "LEFT")
            if data is not None:
                yield AckableMessage(data=data, ack=lambda: self._redis.delete(self._taken))


class _Kept(AsyncResultBackend[Any]):
    """Results in Redis, as JSON."""

    def __init__(self, setting: Setting) -> None:
        self._name = setting.name
        self._redis: Any = AsyncRedis.from_url(setting.redis, socket_timeout=None)

    async def shutdown(self) -> None:
        await self._redis.aclose()

    async def set_result(self, task_id: str, result: TaskiqResult[Any]) -> None:
        await self._redis.set(f"{self._name}:{task_id}", result.model_dump_json())

    async def get_result(self, task_id: str, with_logs: bool = False) -> TaskiqResult[Any]:
        return TaskiqResult.model_validate_json(await self._redis.get(f"{self._name}:{task_id}"))

    async def is_result_ready(self, task_id: str) -> bool:
        return bool(await self._redis.exists(f"{self._name}:{task_id}"))


class TaskiqShop:
    """`pay` adds to the ledger and doubles."""

    def __init__(self, setting: Setting) -> None:
        self.broker = _Lists(setting)

        @self.broker.task(task_name="pay")
        @with_taskiq.once(Inbox(consumer="pay"), setting.transaction_async)
        async def pay(tx: aiosqlite.Connection, amount: int) -> int:
            await tx.execute(ADDED, (amount,))
            return amount * 2

        self.pay = pay

    def work(self) -> None:
        async def receive() -> None:
            self.broker.is_worker_process = True
            await run_receiver_task(self.broker, run_startup=True)

        asyncio.run(receive())


if __name__ == "__main__":
    shops: dict[str, Any] = {"celery": CeleryShop, "dramatiq": DramatiqShop, "taskiq": TaskiqShop}
    shops[sys.argv[1]](Setting.of(os.environ)).work()
