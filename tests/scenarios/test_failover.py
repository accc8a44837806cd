"""An asynchronous standby is promoted that lacks the last commits: Kafka gives them again (ADR 0016).

Twenty times the primary is killed with 200 messages that it alone had, whose offsets the broker knows already. Every
second time the worker is stopped meanwhile. `make test-clusters` runs these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.chaos.databases import PostgresNode
from tests.support.brokers.kafka import committed, new_group, new_topic, produce
from tests.support.brokers.rigs.redis import RedisRig
from tests.support.databases import Raw, require
from tests.support.proxy import Proxy
from tests.support.servers import ServerError
from tests.support.servers.control import ThrowawayKafka
from tests.support.servers.postgresql import PASSWORD
from tests.support.servers.provision import prepare
from tests.support.shop import AT_ONCE, CONSUMER, add_effect, create_effects
from tests.support.waiting import eventually
from tests.support.workers import running, worker
from txbox import App, Message
from txbox.brokers.kafka import Kafka
from txbox.events import CommitsLost, Event
from txbox.testing.brokers import notes

pytestmark = [pytest.mark.slow, pytest.mark.brokers]

ROUNDS, LOST, KEPT = 20, 200, 50


def missing() -> str | None:
    try:
        prepare(["postgresql"], throwaway=True)
    except ServerError as error:
        return str(error)
    return None


class Pair:
    """A primary, and a standby that follows it through a proxy, asynchronously."""

    def __init__(self, stack: ExitStack) -> None:
        self.primary, self.standby = PostgresNode(), PostgresNode()
        for node in (self.primary, self.standby):
            stack.callback(node.remove)
        self.primary.start()
        with Raw(self.primary.url) as raw:
            raw.execute("CREATE DATABASE shop")
        self._wire = stack.enter_context(Proxy(self.primary.url))
        self.standby.follows = self._wire.url
        self.standby.start()
        both = ",".join(f"127.0.0.1:{node.port}" for node in (self.primary, self.standby))
        #: For the worker: whichever of them takes writes.
        self.url = f"postgresql://txbox:{PASSWORD}@{both}/shop?target_session_attrs=read-write"

    def raw(self) -> Raw:
        return Raw(self.primary.url.rpartition("/")[0] + "/shop")

    def is_caught_up(self) -> bool:
        with self.raw() as raw:
            return bool(
                raw.value(
                    "SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= pg_current_wal_lsn()"
                )
            )

    def cut(self) -> None:
        """From here on the standby gets nothing."""
        eventually(self.is_caught_up, "a standby that has caught up")
        self._wire.refuse()

    def promote(self) -> None:
        """The primary dies, and its standby takes over as it is."""
        self.primary.stop(immediate=True)
        self.primary, self.standby = self.standby, self.primary
        with Raw(self.primary.url) as raw:
            raw.rows("SELECT pg_promote(true, 60)")

    def repair(self) -> None:
        """What has died becomes a copy of the new primary, and follows it."""
        self._wire.lead_to(self.primary.url)
        self._wire.go_on()
        self.standby.follow(self._wire.url)


@pytest.fixture
def pair() -> Iterator[Pair]:
    require(missing())
    with ExitStack() as stack:
        yield Pair(stack)


def test_twenty_promotions_that_lose_commits_lose_and_double_nothing(
    throwaway_kafka: ThrowawayKafka, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrap = throwaway_kafka.bootstrap
    topic, group = new_topic(bootstrap), new_group()
    with App(pair.url) as app:
        app.init()
    with pair.raw() as raw:
        create_effects(raw)

    @contextmanager
    def consumed() -> Iterator[None]:
        app = App(pair.url)

        @app.handler(topic, consumer=CONSUMER, retry=AT_ONCE)
        def handle(message: Message[Any], tx: Any) -> None:
            add_effect(tx, message.id, "")

        app.consume(Kafka(bootstrap, group=group, anchored=True))
        with running(worker(app)) as codes:
            yield
        assert codes == [0]

    def effects() -> dict[int, int]:
        with pair.raw() as raw:
            rows = raw.rows("SELECT message_id, count(*) FROM effect GROUP BY message_id")
        return {int(message_id): int(count) for message_id, count in rows}

    def has_all() -> bool:
        return len(effects()) == sent

    def is_done() -> bool:
        return has_all() and committed(bootstrap, group, topic) == sent

    sent, gone = 0, 0
    for number in range(ROUNDS):
        stays = number % 2 == 0
        with ExitStack() as worker_stack:
            worker_stack.enter_context(consumed())
            for count, then in ((KEPT, pair.cut), (LOST, lambda: None)):
                produce(bootstrap, topic, range(sent, sent + count))
                sent += count
                eventually(is_done, f"{sent} effects whose offsets are committed")
                then()
            if not stays:
                worker_stack.close()
            pair.promote()
            lost = sent - len(effects())
            if not stays:
                # nobody works: what the new primary lacks is exactly what was sent behind the cut
                assert lost == LOST
                worker_stack.enter_context(consumed())
            # nothing is sent meanwhile: the worker notices by itself
            eventually(has_all, f"what promotion {number} has lost")
            assert set(effects().values()) == {1}, "nothing is doubled"
            gone += LOST
            pair.repair()
    with capsys.disabled():
        print(
            f"\n{ROUNDS} promotions, {gone} messages gone with them, {sent} sent: 0 lost, 0 doubled"
        )


def test_what_a_queue_does_not_give_again_is_named(redis_url: str, pair: Pair) -> None:
    """Redis has forgotten what was acknowledged: the worker says what is missing, to the message."""
    with App(pair.url) as app:
        app.init()
    with pair.raw() as raw:
        create_effects(raw)
    events = list[Event]()
    app = App(pair.url, observers=[events.append])
    with RedisRig(redis_url) as rig:

        @app.handler(rig.topic, consumer=CONSUMER, retry=AT_ONCE)
        def handle(message: Message[Any], tx: Any) -> None:
            add_effect(tx, message.id, "")

        def ids() -> set[str]:
            with pair.raw() as raw:
                return {str(row[0]) for row in raw.rows("SELECT message_id FROM effect")}

        app.consume(rig.source())
        with running(worker(app)) as codes:
            rig.publish(*notes(KEPT))
            eventually(
                lambda: len(ids()) == KEPT and not rig.outstanding(), "what the standby gets"
            )
            pair.cut()
            rig.publish(*notes(LOST, first=KEPT))
            eventually(
                lambda: len(ids()) == KEPT + LOST and not rig.outstanding(), "what it does not get"
            )
            before = ids()
            pair.promote()
            eventually(lambda: any(isinstance(each, CommitsLost) for each in events), "its name")
            (loss,) = [each for each in events if isinstance(each, CommitsLost)]
            assert before - ids() == set(loss.message_ids)
            assert (loss.count, loss.complete) == (LOST, True)
        assert codes == [0]
