"""Kafka's share groups (KIP-932): the broker hands single records to any member, locks them for a while, and counts.

Everything here follows from two of Kafka's rules. A lock cannot be renewed by this client, and a member gets nothing
more before all of its last batch is acknowledged: so a consumer has several members. And after some deliveries (five)
the broker drops a record, however these ended: so nothing is fetched while the database is away, and what comes a
second time is stored before anything else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import confluent_kafka as client
from confluent_kafka import KafkaError, KafkaException

from txbox.boundaries import log as _log
from txbox.brokers.base import (
    Consumer,
    Context,
    Delivery,
    Source,
    later_if_away,
    refusal,
)
from txbox.brokers.kafka.client import (
    ALL_BROKERS_DOWN,
    REFUSALS,
    ClientLog,
    TopicIds,
    set_up_share_group,
    text_of,
)
from txbox.brokers.kafka.records import add_weak_id, delivery_of, lacks_id
from txbox.errors import BrokerError, BrokerUnavailable, ConfigurationError, Fault, StoreError
from txbox.events import TopicMissing

_LOCK = "share.record.lock.duration.ms"
_LOCK_S = 30.0
# so often the database is asked whether it is there; what is fetched between its end and this has one delivery less
_PROOF_S = 5.0
# an answer, too
_BUSY = (Fault.CONFLICT, Fault.LOCK_TIMEOUT, Fault.TIMEOUT)
#: Members of one process at most. Each but one may wait for its slowest message while the others fetch on.
_MEMBERS_MAX = 4
# another member joins once all have had messages for this long, and leaves when it has had none for so long
_JOIN_S, _LEAVE_S = 0.25, 10.0
# how often missing topics are looked for
_MISSING_S = 30.0
# fetches that fail as a whole, one after the other
_FAILED_MAX = 50
# how long a leaving member waits for the answer to what it has sent, and between two looks
_ANSWER_S, _LOOK_S = 2.0, 0.002
# from this delivery on it is said: by default the broker drops a record after the fifth
_COUNT_SAID = 4

#: Topic, partition, offset.
Coordinates = tuple[str, int, int]


class ShareGroup:
    """What is known of a share group without its broker."""

    def __init__(self, source: Source, config: Mapping[str, Any], group: str) -> None:
        self._source = source
        self._group = group
        self._settings = {
            name: str(value) for name, value in config.items() if name.startswith("share.")
        }
        self._config = {name: value for name, value in config.items() if name not in self._settings}
        try:
            self.lock_s = float(self._settings.get(_LOCK, _LOCK_S * 1000)) / 1000
        except ValueError:
            raise ConfigurationError(
                f"{_LOCK} is {self._settings[_LOCK]!r}: it must be a number."
            ) from None
        self.tend_every_s = _proof_s(self.lock_s)

    def consumer(self, topics: Sequence[str], context: Context) -> ShareConsumer:
        if "*" in topics or not topics:
            raise ConfigurationError(
                "Kafka(share=True) reads topics by name: list them in app.consume(source, topics=[…])."
            )
        if not hasattr(client, "ShareConsumer"):
            raise ConfigurationError(
                f"Kafka(share=True) needs confluent-kafka 2.16 or later, and {client.__version__} is installed."
            )
        return ShareConsumer(
            self._source, self._config, self._group, self._settings, topics, context
        )


class ShareConsumer(Consumer):
    """Members of a share group. See `Kafka`.

    Args:
        config: of each member's client.
        settings: of the group, which it is set to.

    A message is acknowledged (accepted) once it is settled. It is never rejected: a dead one is a row. It is released
    by leaving the group, or by the end of its lock.

    Guarantee: a message is dropped by the broker before it is stored only if as many deliveries as the broker allows
    (`group.share.delivery.count.limit`, five) ended before their first transaction did: by the death of the process, or
    because the database went away in the few seconds since it was last asked.

    Source: docs/decisions/0070-share-groups.md
    """

    def __init__(
        self,
        source: Source,
        config: Mapping[str, Any],
        group: str,
        settings: Mapping[str, str],
        topics: Sequence[str],
        context: Context,
    ) -> None:
        super().__init__(source)
        self._config, self._group, self._settings = config, group, settings
        self._topics = tuple(topics)
        self._context = context
        self._topic_ids = TopicIds(config)
        self._uuids: Mapping[str, str | None] = {}
        # what can never work is told at once
        self._members = [Member(config, self._topics)]
        self._buffer: deque[Delivery] = deque()
        self._ready = self._worked = self._leased = False
        # since when something has been in work, and nothing has been settled
        self._unsettled_at: float | None = None
        self._lock_s = source.redelivery_s or _LOCK_S
        self._proved_at = self._handed_out_at = float("-inf")
        self._missing_at = 0.0
        with later_if_away(self.name):
            self._prepare()

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        self._prove_database()
        if not self._ready:
            self._prepare()
        self._check_topics()
        self._abandon()
        for member in self._members:
            member.acknowledge()
        if not self._buffer:
            self._poll(wait_s)
        count = min(messages_max, len(self._buffer))
        deliveries = [self._buffer.popleft() for _ in range(count)]
        if deliveries:
            self._handed_out_at = time.monotonic()
            self._unsettled_at = self._unsettled_at or self._handed_out_at
        return deliveries

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        """Leave with members that nobody polls, so that they fetch nothing; a lock cannot be extended."""
        self._abandon()
        for member in self._members:
            member.acknowledge()
        self._leave(idle_s=2 * _proof_s(self._lock_s))

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        # their outcomes have been committed
        self._proved_at, self._unsettled_at = time.monotonic(), None
        for delivery in deliveries:
            member, coordinates = delivery.tag
            member.settle(coordinates)
        for member in self._members:
            member.acknowledge()

    def close(self) -> None:
        self._buffer.clear()
        self._leave(idle_s=float("-inf"), working=True)
        self._topic_ids.close()
        if self._leased:
            self._context.progress.release()

    # -- the group -----------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Set the group up, and find out which topics there are; raises BrokerUnavailable."""
        try:
            settings = set_up_share_group(self._config, self._group, self._settings)
        except ConfigurationError as error:
            raise refusal(str(error), worked=self._worked) from error
        self._lock_s = self.redelivery_s = float(settings.get(_LOCK, _LOCK_S * 1000)) / 1000
        self.tend_every_s = _proof_s(self._lock_s)
        self._topic_ids.renew(self._topics)
        self._ready = True

    def _prove_database(self) -> None:
        """Ask whether the database is there, unless it is known; if it is not, fetch nothing, and raise StoreError.

        A worker finds out by itself that its database is away, but only from a message, which is a delivery of it.
        """
        now = time.monotonic()
        if now - self._proved_at < _proof_s(self._lock_s):
            return
        progress = self._context.progress
        try:
            if now - (self._unsettled_at or now) > self._lock_s / 2:
                # nothing gets done: can it be written to? Whoever has the lease, a statement of it is answered
                self._leased = True
                progress.acquire()
            else:
                progress.load()
        except StoreError as error:
            if error.fault not in _BUSY and not (error.code or "").startswith("SQLITE_BUSY"):
                self._leave(idle_s=float("-inf"))
                raise
        self._proved_at = now

    def _check_topics(self) -> None:
        """Read on with other members once a topic has been made again; report missing ones."""
        self._topic_ids.check(self._topics)
        if self._topic_ids.outdated:
            _log.info("%s: a topic was made again, which takes other members", self.name)
            self._leave(idle_s=float("-inf"), working=True)
            self._buffer.clear()
            self._topic_ids.renew(self._topics)
        if time.monotonic() < self._missing_at:
            return
        self._uuids = self._topic_ids.ask(self._topics)
        self._missing_at = time.monotonic() + _MISSING_S
        for topic in self._topics:
            if topic in self._uuids:
                continue
            reason = (
                f"Kafka has no topic {topic!r}: create it, or correct the topic of the handler."
            )
            if not self._uuids:
                self._missing_at = 0.0
                raise BrokerUnavailable(f"{reason} It will be tried again.")
            self._context.report(TopicMissing(source=self.name, topic=topic, reason=reason))

    # -- members -------------------------------------------------------------------------------

    def _poll(self, wait_s: float) -> None:
        free = self._free(wait_s)
        if not free:
            is_soon = time.monotonic() - self._handed_out_at < _JOIN_S
            if len(self._members) == _MEMBERS_MAX or (self._members and is_soon):
                return
            free = [Member(self._config, self._topics)]
            self._members += free
        for member in free:
            try:
                records = member.poll(wait_s / len(free))
                self._buffer.extend(self._deliveries(member, records))
            except BrokerError:
                self._remove(member)
                raise
            except KafkaException as error:
                self._remove(member)
                self._raise(error.args[0])
            if member.failed_fetches > _FAILED_MAX:
                self._remove(member)
                raise BrokerUnavailable(
                    "Kafka fails all fetches of a member of the share group, as those before 4.2 do with half of the "
                    "names that this client gives itself. It will be tried under another name."
                )
        if not self._buffer and len(free) > 1:
            self._leave(idle_s=_LEAVE_S, keep=1)

    def _free(self, wait_s: float) -> list[Member]:
        """The members that may be polled; waits for one that only an answer of the broker is missing to."""
        until = time.monotonic() + wait_s
        while True:
            free = [member for member in self._members if member.is_free]
            if free or time.monotonic() >= until or not self._members:
                return free
            time.sleep(_LOOK_S)
            for member in self._members:
                member.acknowledge()

    def _deliveries(self, member: Member, records: Iterable[client.Message]) -> list[Delivery]:
        now = time.monotonic()
        deliveries: list[Delivery] = []
        trouble: KafkaError | None = None
        for raw in records:
            coordinates = raw.topic() or "", raw.partition() or 0, raw.offset() or 0
            count = raw.delivery_count() or 1
            error = raw.error()
            if error is None:
                delivery = delivery_of(raw, self.name, (member, coordinates), redelivered=count > 1)
            elif raw.offset() is None or (raw.offset() or 0) < 0:
                trouble = error
                continue
            else:
                # a broken batch, or a codec that this client lacks
                delivery = Delivery(
                    None, coordinates[0], (member, coordinates), redelivered=True,
                    problem=f"Partition {coordinates[1]}, offset {coordinates[2]} cannot be read: {error.str()}.",
                )  # fmt: skip
            delivery.store_from = 0.0 if count > 1 else now + self._lock_s / 2
            if count >= _COUNT_SAID:
                _log.warning(
                    "%s: delivery %d of %s[%d] offset %d, which is stored now. After "
                    "group.share.delivery.count.limit (5 by default) Kafka drops a record that is not acknowledged.",
                    self.name, count, *coordinates,
                )  # fmt: skip
            member.in_hand.add(coordinates)
            deliveries.append(delivery)
        if deliveries:
            self._worked = True
        elif trouble is not None:
            self._raise(trouble)
        if any(map(lacks_id, deliveries)):
            # the UUID before this member joined and the one now are the same: it is that of these records
            self._uuids = self._topic_ids.ask(self._topics)
            if self._topic_ids.outdated:
                return []
            for delivery in deliveries:
                add_weak_id(delivery, self._uuids.get(delivery.topic))
        return deliveries

    def _raise(self, error: KafkaError) -> NoReturn:
        """Raise what a member reports.

        Raises:
            ConfigurationError: there are no share groups here.
            BrokerUnavailable: anything else, which may pass.
        """
        if error.code() == KafkaError.UNSUPPORTED_VERSION:
            raise refusal(
                f"This Kafka has no share groups ({error.str()}): use 4.2 or later, or omit share=.",
                worked=self._worked,
            )
        raise BrokerUnavailable(f"Kafka reports: {error.str()}. It will be tried again.")

    def _abandon(self) -> None:
        """Leave with members whose locks have ended: what they have in hand is being given to others."""
        until = time.monotonic() - self._lock_s
        for member in [member for member in self._members if member.in_hand]:
            if member.locked_at < until:
                _log.info(
                    "%s: %d messages are in work for longer than Kafka locks them (%s): they are delivered again, and "
                    "are duplicates once they are done.", self.name, len(member.in_hand), _LOCK,
                )  # fmt: skip
                self._remove(member)

    def _leave(self, *, idle_s: float, working: bool = False, keep: int = 0) -> None:
        """Leave with members that have not been polled, or got nothing, for this long; some are kept."""
        until = time.monotonic() - idle_s
        for member in list(self._members):
            since = member.got_at if keep else member.polled_at
            if len(self._members) > keep and since < until and (working or not member.in_hand):
                self._remove(member)

    def _remove(self, member: Member) -> None:
        self._members.remove(member)
        self._buffer = deque(delivery for delivery in self._buffer if delivery.tag[0] is not member)
        member.close()


class Member:
    """One member of a share group, with a client of its own.

    Attributes:
        in_hand: what it has been given, and has not acknowledged.
        locked_at: when what it has in hand was locked at the earliest.
    """

    def __init__(self, config: Mapping[str, Any], topics: Sequence[str]) -> None:
        self._log = ClientLog()
        self._on_error: Callable[[KafkaError], object] | None = config.get("error_cb")
        self._trouble: KafkaError | None = None
        settings = {
            **config,
            "share.acknowledgement.mode": "explicit",
            "error_cb": self._on_client_error,
            # below, it would not say that fetches fail
            "log_level": max(6, int(config.get("log_level", 6))),
        }
        try:
            self._client: Any = client.ShareConsumer(settings, logger=self._log)
            self._client.set_acknowledgement_commit_callback(self._on_commit)
        except (KafkaException, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"Kafka rejects its options ({text_of(error)}): correct those of Kafka(…)."
            ) from error
        self.in_hand: set[Coordinates] = set()
        self._settled: list[Coordinates] = []
        # sent, without an answer so far
        self._unanswered: set[Coordinates] = set()
        self.polled_at = self.got_at = self.locked_at = time.monotonic()
        self._topics, self._subscribed = topics, False
        self._open = True

    @property
    def failed_fetches(self) -> int:
        """How many fetches have failed since the last that brought something."""
        return self._log.failed_fetches

    def poll(self, wait_s: float) -> list[client.Message]:
        """Raises BrokerUnavailable, or KafkaException."""
        # a fetch goes on behind the poll before: what it brings may have been locked since
        locked_at, self.polled_at = self.polled_at, time.monotonic()
        if not self._subscribed:
            self._client.subscribe(list(self._topics))
            self._subscribed = True
        records = list(self._client.poll(wait_s))
        if records:
            self.locked_at, self.got_at = locked_at, time.monotonic()
            self._log.failed_fetches = 0
        elif self._trouble is not None:
            error, self._trouble = self._trouble, None
            raise BrokerUnavailable(f"Kafka reports: {error.str()}. It will be tried again.")
        return records

    @property
    def is_free(self) -> bool:
        """Whether it may be polled."""
        return not (self.in_hand or self._settled or self._unanswered)

    def settle(self, coordinates: Coordinates) -> None:
        """Have it accepted, unless it is not ours any more."""
        if coordinates in self.in_hand:
            self.in_hand.discard(coordinates)
            self._settled.append(coordinates)

    def acknowledge(self) -> None:
        """Send what is settled, once the broker has answered what was sent before.

        The client (2.16) puts what waits for an answer together, in an order that brokers refuse as a whole. What is
        not taken comes again, and is a duplicate.
        """
        if not self._open or not (self._settled or self._unanswered):
            return
        if self._unanswered:
            # calls `_on_commit` where there is an answer
            self._client.commit_async()
            if self._unanswered:
                return
        settled, self._settled = self._settled, []
        for coordinates in settled:
            try:
                self._client.acknowledge_offset(*coordinates)
            except (KafkaException, client.IllegalStateException) as error:
                _log.debug("Kafka has not taken an acknowledgement: %s", text_of(error))
            else:
                self._unanswered.add(coordinates)
        if self._unanswered:
            self._client.commit_async()

    def close(self) -> None:
        """Send what is settled, and leave; what is in hand is given to others at once."""
        try:
            until = time.monotonic() + _ANSWER_S
            while self._settled and time.monotonic() < until:
                self.acknowledge()
                if self._settled:
                    time.sleep(_LOOK_S)
            self._open = False
            self._client.close()
        except KafkaException as error:
            _log.info("A member of a share group did not leave cleanly: %s", text_of(error))
        finally:
            self._open = False

    def _on_commit(
        self, offsets: Mapping[client.TopicPartition, Iterable[int]], error: object
    ) -> None:
        for partition, numbers in offsets.items():
            for number in numbers:
                self._unanswered.discard((partition.topic, partition.partition, number))
        if error is not None:
            _log.info("Kafka has not taken acknowledgements, so they come again: %s", error)

    def _on_client_error(self, error: KafkaError) -> None:
        if error.code() == ALL_BROKERS_DOWN or error.fatal() or error.code() in REFUSALS:
            self._trouble = error
        if self._on_error is not None:
            self._on_error(error)


def _proof_s(lock_s: float) -> float:
    return min(_PROOF_S, lock_s / 6)
