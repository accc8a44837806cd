"""Kafka through confluent-kafka: a group's partitions, and how far each is settled without gaps.

What members of a share group do instead is in `share.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from txbox.boundaries import log as _log
from txbox.brokers.base import Anchored, Anchors, Consumer, Context, Delivery, Source
from txbox.brokers.facts import Facts, of_kafka
from txbox.brokers.kafka.client import (
    ALL_BROKERS_DOWN,
    FATAL,
    MAX_POLL_EXCEEDED,
    MOVED_ON,
    PARTITION_EOF,
    REFUSALS,
    ClientLog,
    TopicIds,
    checked_options,
    consumer_options,
    is_cooperative,
    leaves_by_request,
    settings_of,
    text_of,
)
from txbox.brokers.kafka.partitions import Anchoring, Assignment, Partition, Record
from txbox.brokers.kafka.publisher import KafkaPublisher
from txbox.brokers.kafka.records import add_weak_id, delivery_of
from txbox.brokers.kafka.share import ShareGroup
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    StoreError,
)
from txbox.events import MessagesLost, TopicMissing

_COMMIT_S = 0.5
# between two looks for the answer to a commit that messages wait for
_ANSWER_S = 0.02
_TEND_S = 0.5
_PROBE_S = 1.0
# how long a member that closes waits for a rebalance to end; a heartbeat is due every three seconds
_LEAVE_S = 3.2
# how often a missing topic is looked for while others are consumed
_MISSING_S = 30.0
#: every topic except internal ones, whose names begin with two underscores
_ALL_TOPICS = "^_?[^_].*"
_MAX_POLL_MS = 300_000
_EARLIEST = {"earliest", "smallest", "beginning"}


class Kafka(Source):
    """Consumes Kafka topics as a member of a consumer group.

    Args:
        bootstrap_servers: "host:port", several separated by commas.
        group: the consumer group; its committed offsets are the progress. Not needed to publish.
        anchored: also keep each partition's progress in the database. After a failover or a restore of
            the database, whatever it lost is read again. The worker's database decides.
        share: consume as a member of a share group (KIP-932; Kafka 4.2): any number of workers share a partition, and
            there is no order. Its settings are options, too: `share_record_lock_duration_ms=60_000`.
        revoke_wait: how long a rebalance waits for the in-flight messages of revoked partitions.
            Those not done by then are delivered to the next owner as well.
        options: librdkafka options under their own names.
        librdkafka: the same with underscores for dots: `session_timeout_ms=6000`.

    Defaults that differ from librdkafka's: `auto.offset.reset` is earliest (a new group misses
    nothing), `isolation.level` is read_committed, and `partition.assignment.strategy` is
    cooperative-sticky (with `group.instance.id` roundrobin) unless `group.protocol` is consumer (KIP-848).
    Auto-commit is refused, and a cooperative strategy with `group.instance.id`.

    A message's weak id is its topic's UUID with partition and offset. A null value is a tombstone.
    `redelivered` marks the first messages of a partition after its assignment, unless the commit says
    that nothing was in work when the last owner gave it back: it may have died of them.

    Guarantee: an offset is committed only after all messages delivered before it are stored. Commits
    are at most half a second behind, and are brought up to date before partitions are released. After
    a crash, or when a partition is lost, what was not committed comes again and is a duplicate.
    `anchored`: an offset is committed only after the database has it too; what a database lost along
    with its last transactions comes again. `share`: see `ShareConsumer`.

    Source: docs/decisions/0016-anchored-offsets.md, docs/decisions/0017-redeliveries-in-bursts.md,
    docs/decisions/0025-kafka-commits.md, docs/decisions/0070-share-groups.md
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        group: str | None = None,
        anchored: bool = False,
        share: bool = False,
        revoke_wait: timedelta = timedelta(seconds=5),
        options: Mapping[str, Any] | None = None,
        **librdkafka: Any,
    ) -> None:
        if not bootstrap_servers:
            raise ConfigurationError(
                'Kafka needs servers: Kafka("localhost:9092", group="shop"); omit group= to publish only.'
            )
        self._servers = bootstrap_servers
        self._options = checked_options(options or {}, librdkafka, share=share)
        config = consumer_options(self._options)
        on_error = config.pop("error_cb", None)
        self._config = config | {"bootstrap.servers": bootstrap_servers, "group.id": group or ""}
        self._group, self._anchored = group or "", anchored
        self.rewinds = anchored
        self.name = f"kafka:{group or bootstrap_servers}"
        self._shared: ShareGroup | None = None
        if share:
            if anchored:
                raise ConfigurationError(
                    "A share group has no offsets that the database could keep: omit anchored= or share=."
                )
            self._shared = ShareGroup(self, self._config, self._group)
            self.tend_every_s = self._shared.tend_every_s
            self.redelivery_s = self._shared.lock_s
            return
        max_poll_s = int(config.get("max.poll.interval.ms", _MAX_POLL_MS)) / 1000
        # without a poll the group takes the partitions away, and `tend` polls
        self.redelivery_s, self.tend_every_s = max_poll_s, min(_TEND_S, max_poll_s / 4)
        revoke_wait_s = revoke_wait.total_seconds()
        if not 0 <= revoke_wait_s < max_poll_s:
            raise ConfigurationError(
                f"revoke_wait is {revoke_wait_s:g} s: it must be less than max.poll.interval.ms "
                f"({max_poll_s:g} s), after which the group drops this member."
            )
        if (member := config.get("group.instance.id")) is not None:
            self.one_process = f"group.instance.id={member!r} names one member"
        self._consumed = partial(
            KafkaConsumer, self, self._config, on_error,
            group=self._group, revoke_wait_s=revoke_wait_s,
        )  # fmt: skip

    def publisher(self) -> KafkaPublisher:
        return KafkaPublisher(self._servers, self._options)

    def examine(self, topics: Sequence[str]) -> Sequence[Facts]:
        """Ask for the retention of topics; it takes the right to DescribeConfigs."""
        return [of_kafka(*described) for described in settings_of(self._config, topics).items()]

    def keeps_order(self, topic: str) -> bool:
        """A key maps to one partition, and a partition to one consumer of the group, unless it is a share group."""
        return self._shared is None

    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        if not self._group:
            raise ConfigurationError(
                'To consume, Kafka needs a group: Kafka("localhost:9092", group="shop").'
            )
        if self._shared is not None:
            return self._shared.consumer(topics, context)
        anchors: Anchors | None = None
        if self._anchored:
            if not isinstance(progress := context.progress, Anchored):
                raise ConfigurationError(
                    "Kafka(anchored=True) needs a worker that keeps anchors: run it with txbox run."
                )
            anchors = progress.anchors
        return self._consumed(topics, context, anchors)


class KafkaConsumer(Consumer):
    """A member of a consumer group. See `Kafka`.

    Args:
        config: of the client.
        on_error: the user's `error_cb`.
        anchors: where offsets are kept in the database, if they are.
    """

    def __init__(
        self,
        source: Kafka,
        config: Mapping[str, Any],
        on_error: Callable[[KafkaError], object] | None,
        topics: Sequence[str],
        context: Context,
        anchors: Anchors | None,
        *,
        group: str,
        revoke_wait_s: float,
    ) -> None:
        super().__init__(source)
        self._on_error = on_error
        self._group, self._revoke_wait_s = group, revoke_wait_s
        self._context = context
        self._config = config
        self._topic_ids = TopicIds(config)
        self._partitions = Assignment(
            group, self._topic_ids, earliest=str(config["auto.offset.reset"]) in _EARLIEST
        )
        if anchors is not None:
            self._partitions.anchoring = Anchoring(group, anchors)
        self._held: deque[tuple[client.Message, Record]] = deque()
        self._trouble: KafkaError | None = None
        self._refusal: KafkaError | None = None
        # the first receive finds out whether a broker answers
        self._away = True
        # subscribed topics that do not exist; the client says so once for each
        self._missing: set[str] = set()
        self._missing_at = 0.0
        self._client_log = ClientLog()
        self._paused = self._closing = False
        self._window = 0
        self._polled_at = self._commit_at = 0.0
        self._topics = [_ALL_TOPICS] if "*" in topics else list(topics)
        self._subscribed = False
        self._consumer = self._new_client()

    def _new_client(self) -> client.Consumer:
        try:
            return client.Consumer(
                {**self._config, "error_cb": self._on_client_error, "on_commit": self._on_commit},
                logger=self._client_log,
            )
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"Kafka rejects its options ({text_of(error)}): correct those of Kafka(…)."
            ) from error

    def _subscribe(self) -> None:
        """Join the group, once it is known which topics the client will hear of; raises BrokerUnavailable."""
        self._topic_ids.renew(topic for topic in self._topics if topic != _ALL_TOPICS)
        self._consumer.subscribe(
            self._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        self._subscribed = True

    def _renew_client(self) -> None:
        """Read on with another client: the present one would never read a topic that was made again, see `TopicIds`.

        It gives its partitions back as at any rebalance, and the other one begins as a new member.
        """
        _log.info("%s: a topic was made again, which takes another client", self.name)
        self._leave(self._consumer)
        self._partitions.forget(self._partitions.values())
        self._held.clear()
        self._paused = self._subscribed = False
        self._consumer = self._new_client()

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        self._window = self._window or messages_max
        self._check_away()
        self._commit_if_due()
        self._partitions.check()
        if self._topic_ids.outdated:
            self._renew_client()
        if not self._subscribed:
            self._subscribe()
        consumer = self._consumer
        self._check_missing()
        self._resume()
        if not any(record.partition.ready for _, record in self._held):
            # the answer to an announcement comes with a poll, and takes no longer for more messages
            answer_due = any(record.partition.placed for _, record in self._held)
            # consume() would wait for a whole batch: wait for one message, then take what is there
            first = consumer.poll(min(wait_s, _ANSWER_S) if answer_due else wait_s)
            if first is not None:
                self._take(first)
                if messages_max > 1 and not answer_due:
                    for raw in consumer.consume(messages_max - 1, 0):
                        self._take(raw)
            self._polled_at = time.monotonic()
        self._partitions.place(consumer)
        self._announce()
        found = self._handed_out(messages_max)
        if not found:
            self._raise_trouble()
        return found

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        consumer = self._consumer
        # first, because the rest raises while the database is away, and the group must not miss this member
        if time.monotonic() - self._polled_at >= (self.tend_every_s or _TEND_S) / 2:
            self._poll_paused(consumer)
        self._commit_if_due()
        self._partitions.check()

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        _settle(deliveries)
        self._commit_if_due()

    def close(self) -> None:
        consumer = self._consumer
        # nobody settles any more, so a revocation inside close() has nothing to wait for
        self._closing = True
        try:
            if self.rested:
                for partition in self._partitions.values():
                    partition.rest()
            if not self._away:
                self._commit(consumer, self._partitions.values(), leaving=True)
        finally:
            # a revocation inside close() has nothing to commit, either
            self._partitions.forget(self._partitions.values())
            self._leave(consumer)
            self._topic_ids.close()

    def _leave(self, consumer: client.Consumer) -> None:
        """Leave the group and close the client.

        A client that closes during a rebalance stays in the group until its session ends, and nobody gets the
        partitions that are being moved: without partitions it does not tell the group at all, and otherwise behind
        a request that is answered only when all members have joined again. So it unsubscribes first, which the client
        puts off to the end of the rebalance. The others hear of that with a heartbeat.
        """
        try:
            if not self._away and leaves_by_request(self._config):
                consumer.unsubscribe()
                until = time.monotonic() + _LEAVE_S
                while consumer.memberid() and time.monotonic() < until:
                    consumer.poll(_ANSWER_S)
        finally:
            consumer.close()

    # -- messages and errors ------------------------------------------------------------------

    def _take(self, raw: client.Message) -> None:
        error = raw.error()
        if error is None:
            topic, offset = raw.topic() or "", raw.offset() or 0
            partition = self._partitions.get((topic, raw.partition() or 0))
            if partition is None:
                # consume() took it, and then ran the rebalance that gives its partition to another member
                return
            if offset <= partition.last:
                # the log was truncated, or the topic made again: what is in flight belongs to another past
                partition = self._partitions.doubt(partition)
            if self._client_log.jumped or partition.jumped:
                self._check_jump(partition, offset)
            record = partition.deliver(offset, raw.leader_epoch(), self._window)
            self._held.append((raw, record))
        elif error.code() == MAX_POLL_EXCEEDED:
            _log.warning("%s: %s; joining the group again.", self.name, error.str())
        elif error.code() == PARTITION_EOF:
            partition = self._partitions.get((raw.topic() or "", raw.partition() or 0))
            last = (raw.offset() or 0) - 1
            if partition is not None and 0 <= partition.last < last:
                # behind the last message are control records only: without this, the lag would never be zero
                partition.settle(partition.deliver(last, None, 0))
        else:
            if error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                # no trouble for the other topics
                self._missing.add(raw.topic() or "")
                self._missing_at = 0.0
            else:
                self._trouble = error

    def _check_jump(self, partition: Partition, offset: int) -> None:
        """Report what retention deleted between the last message, or the last commit, and this one."""
        if self._client_log.jumped:
            # the log does not say for which partition
            self._client_log.jumped = False
            for each in self._partitions.values():
                each.jumped = True
        partition.jumped = False
        consumer = self._consumer
        at = TopicPartition(partition.topic, partition.number)
        try:
            first = partition.last + 1
            if not first:
                (committed,) = consumer.committed([at], timeout=_PROBE_S)
                first = committed.offset
            oldest, _ = consumer.get_watermark_offsets(at, timeout=_PROBE_S)
        except KafkaException as error:
            _log.debug("%s: nothing is known of deleted messages: %s", self.name, text_of(error))
            return
        lost = min(oldest, offset) - first
        if first < 0 or lost <= 0:
            return
        reason = (
            f"lost upstream: retention deleted offsets {first} to {first + lost - 1} of {partition.topic}"
            f"[{partition.number}] before group {self._group} could process them: raise retention.ms or .bytes."
        )
        _log.warning("%s", reason)
        self._context.report(
            MessagesLost(source=self.name, topic=partition.topic, count=lost, reason=reason)
        )

    def _handed_out(self, messages_max: int) -> list[Delivery]:
        found: list[Delivery] = []
        kept: list[tuple[client.Message, Record]] = []
        while self._held and len(found) < messages_max:
            raw, record = self._held.popleft()
            if record.partition.ours and not record.partition.ready:
                kept.append((raw, record))
            elif record.partition.ours:
                record.in_work = True
                delivery = delivery_of(raw, self.name, record, redelivered=record.suspect)
                add_weak_id(delivery, record.partition.uuid)
                found.append(delivery)
        self._held.extendleft(reversed(kept))
        return found

    def _on_client_error(self, error: KafkaError) -> None:
        """Called by the client during poll. Failures of single connections are its own business."""
        if error.code() == ALL_BROKERS_DOWN:
            self._away = True
        elif error.fatal() or error.code() in REFUSALS:
            self._trouble = error
        if self._on_error is not None:
            self._on_error(error)

    def _raise_trouble(self) -> None:
        error, self._trouble = self._trouble, None
        if error is None:
            return
        if error.fatal() or error.code() in FATAL:
            raise BrokerError(f"Kafka ended the membership of group {self._group}: {error.str()}.")
        raise BrokerUnavailable(f"Kafka reports: {error.str()}. It will be tried again.")

    def _check_away(self) -> None:
        """Check whether the brokers are back.

        The client says once that all brokers are down, and never that they are back. Messages do not
        say so either: the client may have fetched them before.
        """
        if self._away:
            self._poll_paused(self._consumer)
            self._described("__consumer_offsets")
            self._away = False

    def _check_missing(self) -> None:
        """Check whether topics that did not exist do now: now and then, and always if nothing else can be received.

        The client says once that a topic is missing, so that silence would look like an empty topic.
        """
        alone = not self._partitions.values()
        if not self._missing or not (alone or time.monotonic() >= self._missing_at):
            return
        if alone:
            self._poll_paused(self._consumer)
        for topic in sorted(self._missing):
            error = self._described(topic).error
            if error is None:
                self._missing.discard(topic)
                continue
            reason = (
                f"Kafka has no topic {topic!r} ({error.str()}): create it, or correct the topic of the "
                "handler. It will be tried again."
            )
            if alone:
                raise BrokerUnavailable(reason)
            self._context.report(TopicMissing(source=self.name, topic=topic, reason=reason))
        self._missing_at = time.monotonic() + _MISSING_S

    def _described(self, topic: str) -> Any:
        try:
            return self._consumer.list_topics(topic, timeout=_PROBE_S).topics[topic]
        except KafkaException as error:
            raise BrokerUnavailable(f"No Kafka broker answers ({text_of(error)}).") from error

    # -- pausing ------------------------------------------------------------------------------

    def _pause(self) -> None:
        consumer = self._consumer
        self._paused = True
        if assigned := consumer.assignment():
            consumer.pause(assigned)

    def _poll_paused(self, consumer: client.Consumer) -> None:
        self._pause()
        raw = consumer.poll(0)
        if raw is not None:
            self._take(raw)
        # a rebalance inside poll may have added partitions that are not paused yet
        self._pause()
        self._polled_at = time.monotonic()

    def _resume(self) -> None:
        if self._paused:
            consumer = self._consumer
            if assigned := consumer.assignment():
                consumer.resume(assigned)
            self._paused = False

    # -- committing ---------------------------------------------------------------------------

    def _commit_if_due(self) -> None:
        self._raise_refusal()
        if self._away or time.monotonic() < self._commit_at:
            return
        if any(partition.is_behind(leaving=False) for partition in self._partitions.values()):
            # before it, as it raises while the database is away; an announcement does not put it off
            self._commit_at = time.monotonic() + _COMMIT_S
            self._commit(self._consumer, self._partitions.values())

    def _announce(self) -> None:
        """Let the group know, by a commit, of which partitions something is about to be in work.

        Without an answer, or without that commit, the first messages are handed out as suspect after a moment.
        """
        if not self._away and (
            new := [each for each in self._partitions.values() if each.announce()]
        ):
            self._commit(self._consumer, new)

    def _commit(
        self, consumer: client.Consumer, among: Iterable[Partition], *, leaving: bool = False
    ) -> None:
        """Commit the fronts that are behind. Unless `leaving`, results arrive at `_on_commit` in a later poll.

        While messages flow nobody waits: if the coordinator has died, the client holds a commit until
        there is a new one, and the pump would stand still that long. A refused commit counts as behind
        again, and is retried as long as the partition is ours.
        Raises:
            BrokerUnavailable: a commit was refused, if that is known already.
            StoreError: the fronts could not be anchored; no commit was sent.
        """
        behind = [partition for partition in among if partition.is_behind(leaving=leaving)]
        if not behind:
            return
        anchoring = self._partitions.anchoring
        if anchoring is not None:
            lost = anchoring.advance(behind)
            self._partitions.read_again(lost)
            behind = [partition for partition in behind if partition not in lost]
        anchored = anchoring is not None
        offsets = [partition.commit(anchored=anchored, leaving=leaving) for partition in behind]
        if not offsets:
            return
        try:
            if leaving:
                self._on_commit(None, consumer.commit(offsets=offsets, asynchronous=False))
            else:
                consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._on_commit(error.args[0], offsets)
        if leaving:
            self._raise_refusal()

    def _on_commit(self, error: KafkaError | None, offsets: Iterable[TopicPartition]) -> None:
        """Called by the client during poll, and after a synchronous commit."""
        for answer in offsets:
            refusal = answer.error or error
            if partition := self._partitions.get((answer.topic, answer.partition)):
                partition.answer(answer.offset, refused=refusal is not None)
            if refusal is None:
                continue
            if refusal.code() in MOVED_ON:
                # retried after the rebalance, if the partition is still ours
                _log.info(
                    "%s: not committed while the group rebalances: %s", self.name, refusal.str()
                )
            elif refusal.fatal():
                # raised by the next receive that finds no messages
                self._trouble = refusal
            else:
                self._refusal = refusal

    def _raise_refusal(self) -> None:
        """Raise BrokerUnavailable once if a commit was refused since the last call."""
        error, self._refusal = self._refusal, None
        if error is not None:
            raise BrokerUnavailable(f"Kafka did not accept the commit ({error.str()}).")

    # -- rebalances: called by the client inside poll, consume and close ----------------------

    def _assigned(self, consumer: client.Consumer, partitions: list[TopicPartition]) -> None:
        self._tell("assigned", partitions)
        # a partition that was paused when it was lost comes back paused; the next receive resumes all
        self._paused = True
        for topic_partition in partitions:
            if old := self._partitions.get((topic_partition.topic, topic_partition.partition)):
                # lost without notice: reading restarts at the last commit
                self._partitions.forget([old])
            self._partitions.add(topic_partition.topic, topic_partition.partition)
        # one that closes gives them back in a moment
        starts = partitions if self._closing else self._partitions.begin(consumer, partitions)
        if is_cooperative(self._config):
            consumer.incremental_assign(starts)
        else:
            consumer.assign(starts)

    def _revoked(self, consumer: client.Consumer, partitions: list[TopicPartition]) -> None:
        self._tell("revoked", partitions)
        leaving = self._partitions.known(partitions)
        gone = {id(partition) for partition in leaving}
        if not self._closing:
            _settle(
                self._context.settled(
                    lambda delivery: id(delivery.tag.partition) in gone, self._revoke_wait_s
                )
            )
        try:
            if not self._away:
                self._commit(consumer, leaving, leaving=True)
        except (BrokerError, StoreError) as error:
            # the next owner starts at the last commit and meets duplicates
            _log.info("%s: revoked without a commit: %s", self.name, error)
        self._partitions.forget(leaving)

    def _lost(self, _: client.Consumer, partitions: list[TopicPartition]) -> None:
        self._tell("lost", partitions)
        self._partitions.forget(self._partitions.known(partitions))

    def _tell(self, what: str, partitions: Sequence[TopicPartition]) -> None:
        """Log what happened to partitions, as `orders[0,1] invoices[0]`."""
        numbers: dict[str, list[str]] = {}
        for partition in sorted(partitions, key=lambda each: (each.topic, each.partition)):
            numbers.setdefault(partition.topic, []).append(str(partition.partition))
        if numbers:
            listed = (f"{topic}[{','.join(of_topic)}]" for topic, of_topic in numbers.items())
            _log.info("%s: %s %s", self.name, what, " ".join(listed))


def _settle(deliveries: Iterable[Delivery]) -> None:
    for delivery in deliveries:
        delivery.tag.partition.settle(delivery.tag)
