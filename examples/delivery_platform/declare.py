"""What must be there before the services start: tables, and topics or queues."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import Any

from delivery_platform import notifications, scans, settings
from delivery_platform.settings import BROKER, SCANS, STATUS


def declare() -> None:
    for app in {scans.app, notifications.app}:
        app.init()
    with closing(_connected(settings.SCANS_DATABASE)) as database:
        database.execute(scans.TABLE)
        database.commit()
    if BROKER.startswith("kafka:"):
        _topics(BROKER.partition("://")[2])
    elif BROKER:
        asyncio.run(_queues())


def _connected(url: str) -> Any:
    if url.startswith("sqlite"):
        return sqlite3.connect(url.removeprefix("sqlite:///"))
    import psycopg

    return psycopg.connect(url)


def _topics(bootstrap: str) -> None:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    wanted = [NewTopic(topic, num_partitions=3, replication_factor=1) for topic in (SCANS, STATUS)]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for created in admin.create_topics(wanted).values():
        created.result(30)


async def _queues() -> None:
    import aio_pika

    async with await aio_pika.connect(BROKER) as connection:
        channel = await connection.channel()
        for queue in (SCANS, STATUS):
            await channel.declare_queue(queue, durable=True)
