"""The partitions of one group member: what was delivered from each, and where reading starts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import confluent_kafka as client
from confluent_kafka import OFFSET_BEGINNING, OFFSET_INVALID, KafkaException, TopicPartition

from txbox.boundaries import log as _log
from txbox.brokers.base import Anchor, Anchors
from txbox.brokers.kafka.client import ASK_S, TopicIds, text_of
from txbox.errors import BrokerUnavailable, ConfigurationError, StoreError

_CHECK_S = 5.0
# how soon a partition that could not be placed is tried again
_PLACE_S = 0.5
#: The metadata of a commit is one of these and the topic's UUID; where it is anchored, also since which offset.
_TOPIC, _ANCHORED = "txbox topic ", "txbox anchored "
#: … and at its end that nothing behind the commit was in work when the partition was given back.
_IDLE = "idle"
#: So long a partition's first messages wait until the group knows that they are in work.
_ANNOUNCE_S = 0.25


@dataclass(slots=True, eq=False)
class Record:
    """One received record.

    Args:
        early: it is one of the first of its assignment, as many as may be in work at once.
        in_work: it was handed out, and may be what this process dies of.
    """

    partition: Partition
    offset: int
    epoch: int | None
    early: bool
    in_work: bool = False
    settled: bool = False

    @property
    def suspect(self) -> bool:
        """Whether another member may have died of it, or this one could, unknown to the next owner."""
        partition = self.partition
        return not partition.announced or (self.early and not partition.clean)


@dataclass(slots=True, eq=False)
class Partition:
    """What was delivered from one partition since it was assigned, and how far it is settled without gaps.

    Args:
        uuid: of the topic, as it was before reading began: what is read is of that topic, or of one made later under
            its name. None if the broker does not tell.
        placed: it is known where reading starts; nothing is handed out before that.
        moved: reading must start elsewhere than where the client is.
        front: the last record below which everything is settled; asked: the one last sent for commit.
        jumped: the client may have jumped over messages before the next one.
        floor: the first offset since offsets have been anchored.
        anchor: as it was before anything was handed out that the front may come to cover.
        clean: the last owner gave it back with nothing in work, or nobody has had anything of it.
        announced: the group knows from a commit of ours that something may be in work.
        announce_until: by the monotonic clock; what is received until then waits for the answer to that commit.
        window: the most that may be in work at once.
    """

    topic: str
    number: int
    uuid: str | None = None
    ours: bool = True
    delivered: int = 0
    waiting: deque[Record] = field(default_factory=deque[Record])
    front: Record | None = None
    asked: Record | None = None
    committed: Record | None = None
    last: int = -1
    placed: bool = False
    moved: bool = True
    jumped: bool = False
    floor: int | None = None
    anchor: Anchor | None = None
    clean: bool = False
    announced: bool = False
    announce_until: float | None = None
    window: int = 0

    def again(self) -> Partition:
        """Return the partition reset, to be read from elsewhere; what was delivered is forgotten."""
        return Partition(
            self.topic, self.number, self.uuid, delivered=self.delivered,
            placed=self.placed, moved=self.moved, floor=self.floor, anchor=self.anchor,
            clean=self.clean, announced=self.announced, window=self.window,
        )  # fmt: skip

    @property
    def ready(self) -> bool:
        """Whether what was received may be handed out."""
        return self.placed and (
            self.announced
            or (self.announce_until is not None and time.monotonic() >= self.announce_until)
        )

    def announce(self) -> bool:
        """Have the first message that was received committed as the next one; returns whether that is new."""
        if self.announced or self.announce_until is not None or not (self.placed and self.waiting):
            return False
        self.announce_until = time.monotonic() + _ANNOUNCE_S
        if self.front is None:
            self.front = Record(self, self.waiting[0].offset - 1, None, early=False, settled=True)
        return True

    def at(self, offset: int) -> TopicPartition:
        return TopicPartition(self.topic, self.number, offset)

    def deliver(self, offset: int, epoch: int | None, window: int) -> Record:
        record = Record(self, offset, epoch, self.delivered < window)
        self.delivered += 1
        self.window = max(self.window, window)
        self.last = offset
        if self.floor is None:
            self.floor = offset
        self.waiting.append(record)
        return record

    def settle(self, record: Record) -> None:
        # offsets have gaps (transactions, compaction), so only delivered records count
        record.settled = True
        while self.waiting and self.waiting[0].settled:
            self.front = self.waiting.popleft()

    def answer(self, offset: int, *, refused: bool) -> None:
        """Record the result of committing this offset; results of older commits are ignored."""
        if self.asked is not None and self.asked.offset + 1 == offset:
            if refused:
                self.asked = self.committed
            else:
                self.committed = self.asked
                self.announced = True

    @property
    def idle(self) -> bool:
        """Nothing of it is in work, nor may anything be left that an earlier owner died of."""
        passed = self.clean or self.delivered - len(self.waiting) >= self.window
        return passed and not any(record.in_work and not record.settled for record in self.waiting)

    def rest(self) -> None:
        """Nothing is in work any more, whether it is settled or not."""
        for record in self.waiting:
            record.in_work = False

    def is_behind(self, *, leaving: bool) -> bool:
        """Whether the front needs a commit. One that was sent counts as done, unless the partition is given back."""
        if self.front is None:
            return False
        return (
            self.idle or self.front is not self.committed
            if leaving
            else self.front is not self.asked
        )

    def commit(self, *, anchored: bool, leaving: bool) -> TopicPartition:
        """Return the commit of the front.

        Its metadata says of which topic, since which offset it is anchored, and, of one that is given back, whether
        it is idle.
        """
        assert self.front is not None, "only what is behind is committed"
        self.asked = self.front
        mark = f"{_ANCHORED}{self.uuid} {self.floor}" if anchored else f"{_TOPIC}{self.uuid}"
        if leaving and self.idle:
            mark = f"{mark} {_IDLE}"
        if self.uuid is None:
            mark = ""
        epoch = {} if self.front.epoch is None else {"leader_epoch": self.front.epoch}
        return TopicPartition(self.topic, self.number, self.front.offset + 1, mark, **epoch)


class Assignment(dict[tuple[str, int], Partition]):
    """The partitions that are ours, by topic and number; with `anchoring` their offsets are anchored.

    Guarantee: a commit names the topic of which everything below it is stored. A topic made again under that name is
    read from its beginning, whatever was committed of the deleted one.

    Source: docs/decisions/0061-topics-made-again.md
    """

    def __init__(self, group: str, topics: TopicIds, *, earliest: bool) -> None:
        super().__init__()
        self.anchoring: Anchoring | None = None
        self._group, self._topics, self._earliest = group, topics, earliest
        self._place_at = 0.0

    def add(self, topic: str, number: int) -> None:
        self[topic, number] = Partition(topic, number)

    def known(self, partitions: Iterable[TopicPartition]) -> list[Partition]:
        keys = [
            (topic_partition.topic, topic_partition.partition) for topic_partition in partitions
        ]
        return [self[key] for key in keys if key in self]

    def replace(self, partition: Partition) -> Partition:
        """Forget what was delivered from a partition that stays ours."""
        partition.ours = False
        new = self[partition.topic, partition.number] = partition.again()
        return new

    def doubt(self, partition: Partition) -> Partition:
        """Replace a partition whose offsets start over; `place` finds out whether its topic was made again."""
        new = self.replace(partition)
        new.placed, self._place_at = False, 0.0
        return new

    def forget(self, partitions: Iterable[Partition]) -> None:
        for partition in list(partitions):
            partition.ours = False
            self.pop((partition.topic, partition.number), None)

    def read_again(self, partitions: Iterable[Partition]) -> None:
        """Forget what was delivered: the database lost commits, or the topic was made again."""
        for partition in partitions:
            new = self.doubt(partition)
            new.moved, new.anchor = True, None

    def check(self) -> None:
        """Every few seconds, read again what the database has lost, and topics made again; raises StoreError."""
        uuids = self._topics.check(partition.topic for partition in self.values())
        if uuids:
            self.read_again(
                [
                    partition
                    for partition in self.values()
                    if partition.placed
                    # also where it was not known until now
                    and uuids.get(partition.topic) not in (None, partition.uuid)
                ]
            )
        if self.anchoring is not None:
            self.read_again(
                self.anchoring.check([partition for partition in self.values() if partition.placed])
            )

    def begin(
        self, consumer: client.Consumer, partitions: Sequence[TopicPartition]
    ) -> list[TopicPartition]:
        """Return new partitions with the offsets to start at; without an answer, `place` seeks them later."""
        starts: dict[tuple[str, int], TopicPartition] = {}
        try:
            for start in self._starts(consumer, self.known(partitions)):
                start.apply(start.partition)
                starts[start.at.topic, start.at.partition] = start.at
        except (BrokerUnavailable, ConfigurationError, StoreError) as error:
            # the next receive asks again, and raises this; nothing is handed out before
            _log.info("It is not known yet where reading starts: %s", error)
        return [starts.get((each.topic, each.partition), each) for each in partitions]

    def place(self, consumer: client.Consumer) -> None:
        """Determine where reading of the other partitions starts, and seek there.

        One that cannot be sought yet, or whose topic is gone, stays unplaced.

        Raises:
            BrokerUnavailable, StoreError: no answer; nothing may be handed out until there is one.
        """
        unplaced = [partition for partition in self.values() if not partition.placed]
        if not unplaced or time.monotonic() < self._place_at:
            return
        for start in self._starts(consumer, unplaced):
            partition = start.partition
            if start.at.offset != OFFSET_INVALID:
                try:
                    consumer.seek(start.at)
                except KafkaException as error:
                    # not being read yet, or no longer ours
                    _log.info(
                        "%s[%d] is not sought yet: %s",
                        partition.topic, partition.number, text_of(error),
                    )  # fmt: skip
                    continue
                # what was received before the seek, and not handed out, comes again or is of the deleted topic
                partition.delivered -= len(partition.waiting)
                partition = self.replace(partition)
            start.apply(partition)
        if not all(partition.placed for partition in self.values()):
            self._place_at = time.monotonic() + _PLACE_S

    def _starts(
        self, consumer: client.Consumer, partitions: Sequence[Partition]
    ) -> Iterator[Start]:
        """Yield where reading starts, for those whose topic exists.

        First the UUID, then the commit, then reading: what is read then is of this topic or of a later one,
        which the next look or the next assignment tells from it.
        """
        uuids = self._topics.ask(partition.topic for partition in partitions)
        moved: list[Partition] = []
        for partition in partitions:
            if partition.topic not in uuids:
                continue
            if partition.moved or _differ(partition.uuid, uuids[partition.topic]):
                moved.append(partition)
            else:
                # only its log was truncated: the client has found where it goes on
                at = partition.at(OFFSET_INVALID)
                yield Start(
                    partition, at, partition.uuid, partition.floor, partition.anchor, partition.clean
                )  # fmt: skip
        if not moved:
            return
        commits = _committed(consumer, moved)
        anchors: Sequence[Anchor | None] = [None] * len(moved)
        if self.anchoring is not None:
            anchors = self.anchoring.read(moved, uuids)
        for partition, commit, anchor in zip(moved, commits, anchors, strict=True):
            yield self._start(partition, uuids[partition.topic], commit, anchor)

    def _start(
        self, partition: Partition, uuid: str | None, commit: TopicPartition, anchor: Anchor | None
    ) -> Start:
        marked, floor, clean = _marked(commit.metadata)
        if partition.uuid is not None:
            # known since its assignment
            clean = partition.clean
        # if it is not known now, a later look compares with what it was
        uuid = uuid or partition.uuid or marked
        position = None if anchor is None else anchor.position
        another = self._topics.is_another(partition.topic, uuid) or _differ(partition.uuid, uuid)
        if _differ(marked, uuid) or (another and marked != uuid):
            _log.warning(
                "%s was deleted and made again: group %s reads partition %d from its beginning (committed: %d).",
                partition.topic, self._group, partition.number, commit.offset,
            )  # fmt: skip
            at = partition.at(OFFSET_BEGINNING if position is None else position)
            return Start(partition, at, uuid, 0, anchor, clean)
        at, again = commit, partition.uuid is not None
        if commit.offset < 0:
            # whoever had something of it would have committed first
            clean = clean or partition.uuid is None
            # an operator who deletes offsets wants what auto.offset.reset says, not the anchors
            floor = partition.floor if again or not self._earliest else None
            start = floor if position is None or not again else position
            if start is None:
                start = OFFSET_BEGINNING if self._earliest else OFFSET_INVALID
            at = partition.at(start)
        elif floor is not None and self.anchoring is not None:
            lowest = floor if position is None else position
            if lowest < commit.offset:
                at, again = partition.at(lowest), True
        else:
            # a commit that is not anchored (by an operator, say) does not rely on the database
            floor = commit.offset
        if again and self.anchoring is not None:
            _log.error(
                "The database was restored, failed over or restarted: group %s reads %s[%d] again from offset %d "
                "(committed: %d). Messages the database still has will be duplicates.",
                self._group, partition.topic, partition.number, at.offset, commit.offset,
            )  # fmt: skip
        return Start(partition, at, uuid, floor, anchor, clean)


@dataclass(frozen=True, slots=True)
class Start:
    """Where reading of a partition starts (OFFSET_INVALID: where the client is), and what is known of it then."""

    partition: Partition
    at: TopicPartition
    uuid: str | None
    floor: int | None
    anchor: Anchor | None
    clean: bool

    def apply(self, partition: Partition) -> None:
        partition.uuid, partition.floor, partition.anchor = self.uuid, self.floor, self.anchor
        partition.clean = self.clean
        partition.placed, partition.moved = True, False


class Anchoring:
    """Keeps each partition's front in the database.

    Guarantee: a front is stored only in a database that still has everything it covers.

    Source: docs/decisions/0016-anchored-offsets.md
    """

    def __init__(self, group: str, anchors: Anchors) -> None:
        self._group = group
        self._anchors = anchors
        self._check_at = 0.0

    def read(
        self, partitions: Sequence[Partition], uuids: Mapping[str, str | None]
    ) -> list[Anchor]:
        """Return the anchors of partitions whose topics have these UUIDs; raises StoreError."""
        names = [self._name(partition, uuids[partition.topic]) for partition in partitions]
        stored = self._anchors.read(names)
        return [stored[name] for name in names]

    def advance(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Store the fronts; returns the partitions for which the database has lost something."""
        moves = {
            self._name(partition, partition.uuid): (partition.front.offset + 1, partition.anchor)
            for partition in partitions
            if partition.front is not None and partition.anchor is not None
        }
        return self._compared(partitions, moves)

    def check(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Check for losses without storing anything, every few seconds: for partitions that are idle."""
        if not partitions or time.monotonic() < self._check_at:
            return []
        lost = self._compared(partitions, None)
        self._check_at = time.monotonic() + _CHECK_S
        return lost

    def _compared(
        self, partitions: Sequence[Partition], moves: dict[str, tuple[int, Anchor]] | None
    ) -> list[Partition]:
        names = [self._name(partition, partition.uuid) for partition in partitions]
        found = self._anchors.read(names) if moves is None else self._anchors.advance(moves)
        lost: list[Partition] = []
        for partition, name in zip(partitions, names, strict=True):
            assert partition.anchor is not None, "only placed partitions are compared"
            if partition.anchor.is_missing_in(found[name]):
                lost.append(partition)
            else:
                partition.anchor = found[name]
        return lost

    def _name(self, partition: Partition, uuid: str | None) -> str:
        if uuid is None:
            raise ConfigurationError(
                f"Kafka(anchored=True) needs the UUID of {partition.topic}: allow the client to "
                "describe the topic, on brokers of version 2.8 or later."
            )
        return f"kafka:{self._group}:{uuid}:{partition.number}"


def _differ(uuid: str | None, other: str | None) -> bool:
    """Whether these are two topics, as far as is known."""
    return uuid is not None and other is not None and uuid != other


def _marked(metadata: str | None) -> tuple[str | None, int | None, bool]:
    """Return the topic's UUID and the floor in a commit's metadata, None if not there; and whether it was idle."""
    for kind in (_TOPIC, _ANCHORED):
        if metadata and metadata.startswith(kind):
            uuid, *words = metadata.removeprefix(kind).split(" ")
            floor = next((int(word) for word in words if word.isdecimal()), None)
            return uuid, floor, _IDLE in words
    return None, None, False


def _committed(
    consumer: client.Consumer, partitions: Iterable[Partition]
) -> Sequence[TopicPartition]:
    asked = [partition.at(OFFSET_INVALID) for partition in partitions]
    try:
        found = consumer.committed(asked, timeout=ASK_S)
    except KafkaException as error:
        raise BrokerUnavailable(
            f"Kafka does not return the committed offsets ({text_of(error)})."
        ) from error
    by_key = {(answer.topic, answer.partition): answer for answer in found}
    answers = [
        by_key[topic_partition.topic, topic_partition.partition] for topic_partition in asked
    ]
    for answer in answers:
        if answer.error is not None:
            raise BrokerUnavailable(
                f"Kafka does not return the committed offsets ({answer.error.str()})."
            )
    return answers
