"""Where everything is, from the environment; without any of it, one SQLite file and no broker."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

from txbox import App, Lease, RelayPolicy, RetryPolicy
from txbox.brokers.local import Local

#: "kafka://localhost:9092", "amqp://guest:guest@localhost:5672/", or nothing: no broker
BROKER = os.environ.get("PLATFORM_BROKER", "")
SCANS_DATABASE = os.environ.get("SCANS_DATABASE_URL", "sqlite:///platform.db")
NOTIFICATIONS_DATABASE = (
    os.environ.get("NOTIFICATIONS_DATABASE_URL", "sqlite:///notifications.db")
    if BROKER
    else SCANS_DATABASE
)
SCANS = os.environ.get("SCANS_TOPIC", "package.scans")
STATUS = os.environ.get("STATUS_TOPIC", "package.status")
#: of Kafka: another one reads both topics from their beginning, which is a replay of everything
GROUP = os.environ.get("GROUP", "platform")
SMTP = os.environ.get("SMTP_ADDRESS", "localhost:8025")

#: how long what a killed process held is left alone; its processes start again within that
LEASE = timedelta(seconds=float(os.environ.get("LEASE_S", "60")))
#: starts of a message that never ended: after so many it is taken for the one that kills processes
MAX_STARTS = int(os.environ.get("MAX_STARTS", "3"))

#: a mail server that is away is tried again soon at first, for about a day
MAIL_RETRY = RetryPolicy(max_attempts=40, base=timedelta(seconds=1), cap=timedelta(hours=1))


def service(name: str) -> App:
    """The App of a service: its own, or, without a broker, the one that all of them share."""
    if not BROKER:
        return _shared()
    app = _app(SCANS_DATABASE if name == "scans" else NOTIFICATIONS_DATABASE)
    transport = broker(name)
    if name == "scans":
        app.consume(transport, topics=[SCANS])
        app.publish(transport, topics=[STATUS])
    else:
        app.consume(transport, topics=[STATUS])
    return app


def _app(database: str) -> App:
    return App(
        database,
        lease=Lease(duration=LEASE, max_starts=MAX_STARTS),
        relaying=RelayPolicy(lease=LEASE, confirm_within=LEASE / 3),
    )


@cache
def _shared() -> App:
    app = _app(SCANS_DATABASE)
    # work comes from the table, and what is staged goes to the handlers of this App
    app.consume(Local())
    return app


def broker(name: str) -> Any:
    """The broker as this service sees it, to consume from and to publish to."""
    scheme, _, address = BROKER.partition("://")
    if scheme == "kafka":
        from txbox.brokers.kafka import Kafka

        # a static member that comes back is given its partitions at once
        instance = os.environ.get("INSTANCE")
        static = {"group.instance.id": f"{name}-{instance}"} if instance else {}
        return Kafka(address, group=f"{GROUP}-{name}", options=static)
    from txbox.brokers.rabbitmq import RabbitMQ

    return RabbitMQ(BROKER)


def sql(statement: str) -> str:
    """A statement in the words of the service's driver: sqlite3 marks values with ?, psycopg with %s."""
    return statement if SCANS_DATABASE.startswith("sqlite") else statement.replace("?", "%s")
