"""Throw-away servers for tests that stop a database or a broker under a running worker."""

from __future__ import annotations

import itertools

from tests.support.servers.elasticmq import ElasticMQServer
from tests.support.servers.kafka import KafkaServer
from tests.support.servers.mariadb import MariaDBServer
from tests.support.servers.mysql import MySQLServer
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgresql import PostgreSQLServer
from tests.support.servers.process import ServerProcess, Throwaway, throwaway_name
from tests.support.servers.rabbitmq import RabbitMQServer
from tests.support.servers.redis import RedisServer

_numbers = itertools.count(1)


def _fresh_name(kind: str) -> str:
    return throwaway_name(kind, next(_numbers))


class _Throwaway(Throwaway, ServerProcess):
    def _start_all(self) -> None:
        self.start()

    def _remove(self) -> None:
        self.remove()


class ThrowawayPostgres(_Throwaway, PostgreSQLServer):
    """`with ThrowawayPostgres() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. What was committed survives `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("postgresql"), preferred_port=24532)


class ThrowawayMariaDB(_Throwaway, MariaDBServer):
    """`with ThrowawayMariaDB() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. What was committed survives `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("mariadb"), preferred_port=23506)


class ThrowawayMySQL(_Throwaway, MySQLServer):
    """`with ThrowawayMySQL() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. What was committed survives `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("mysql"), preferred_port=23507)


class ThrowawayRabbitMQ(_Throwaway, RabbitMQServer):
    """`with ThrowawayRabbitMQ() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. Confirmed persistent messages in durable queues survive `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("rabbitmq"), preferred_port=25872)

    def wait_until_kept(self, quorum_queue: str) -> None:
        """Call this between declaring a quorum queue and `stop(immediate=True)`.

        RabbitMQ writes its list of quorum queues every half second. Killed before that, it comes
        back with a queue that has no leader, and every call on that queue waits for ever.
        """
        self._wait_until_listed(quorum_queue)


class ThrowawayRedis(_Throwaway, RedisServer):
    """`with ThrowawayRedis() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. What was acknowledged survives `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("redis"), preferred_port=26579)


class ThrowawayNats(_Throwaway, NatsServer):
    """`with ThrowawayNats() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. What a stream acknowledged survives `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("nats"), preferred_port=24422)


class ThrowawayKafka(_Throwaway, KafkaServer):
    """`with ThrowawayKafka() as server`: `.bootstrap`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. What was acknowledged survives `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("kafka"), preferred_port=29492)


class ThrowawayElasticMQ(_Throwaway, ElasticMQServer):
    """`with ThrowawayElasticMQ() as server`: `.url`, `.stop(immediate=True)`, `.start()`.

    The port stays the same from stop to start. Queues and messages survive `immediate`.
    """

    def __init__(self) -> None:
        super().__init__(_fresh_name("sqs"), preferred_port=29724)


class ThrowawayKafkaCluster(Throwaway):
    """`with ThrowawayKafkaCluster(brokers=3) as cluster`: `.bootstrap`, `.stop(2, immediate=True)`.

    Brokers are numbered from 1, the numbers that Kafka's metadata shows. Each is a controller too:
    the cluster lives as long as more than half of them. Topics have a copy on every broker of
    three, and `acks=all` waits for two.
    """

    def __init__(self, brokers: int = 3) -> None:
        self._servers = {
            node: KafkaServer(_fresh_name("kafka"), preferred_port=29592)
            for node in range(1, brokers + 1)
        }

    @property
    def bootstrap(self) -> str:
        return ",".join(server.bootstrap for server in self._servers.values())

    def stop(self, broker: int, *, immediate: bool = False) -> None:
        """Stop one broker, keeping its data; `immediate` is SIGKILL."""
        self._servers[broker].stop(immediate=immediate)

    def start(self, broker: int) -> None:
        """Start a stopped broker again; returns when the cluster lists it."""
        self._servers[broker].start()

    def _start_all(self) -> None:
        for server in self._servers.values():
            server.claim()
        controllers = {node: server.controller_port for node, server in self._servers.items()}
        for node, server in self._servers.items():
            server.join(node, controllers)
            server.launch()  # none answers before most of them run
        for server in self._servers.values():
            server.wait_ready()

    def _remove(self) -> None:
        for server in self._servers.values():
            server.remove()
