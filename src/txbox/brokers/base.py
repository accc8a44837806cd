"""What sources, consumers and publishers are, and what they share."""

from __future__ import annotations

import operator
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from txbox.boundaries import Boundary, is_contents
from txbox.boundaries import log as _log
from txbox.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DestinationRefused,
    MessageRefused,
    NotTried,
)
from txbox.events import Event
from txbox.message import Message

Entry = TypeVar("Entry")

#: At the end of a publisher's time: for finding out whether the server is there at all.
LAST_WORD_S = 0.5


@dataclass(slots=True, eq=False)
class Delivery:
    """A message, together with the right to acknowledge it.

    Args:
        message: None when the bytes are not a message. Then `problem` says why, for people, and `raw`
            keeps the bytes (only their beginning if they are too long).
        topic: where it came from; a problem is reported to the consumers of this topic.
        tag: private to the source.
        redelivered: the broker says that an earlier delivery was not acknowledged.
        received_at: by `time.monotonic`.
        store_from: by `time.monotonic`: from then on it is stored, to be run from the table, instead of run at once.
            For a broker that gives a message up after some deliveries, however these ended. None is never.
    """

    message: Message[Any] | None
    topic: str
    tag: Any = None
    problem: str | None = None
    raw: bytes = b""
    redelivered: bool = False
    received_at: float = field(default_factory=time.monotonic)
    store_from: float | None = None

    @property
    def size_bytes(self) -> int:
        """What it counts against the limit on bytes in flight."""
        return len((self.message.payload or b"") if self.message is not None else self.raw)


class Progress(Protocol):
    """Where a source without a broker stores its progress: a row in the database.

    One process at a time holds it, for a few seconds after each `acquire`. Every method may raise
    StoreError. `load` returns what was saved last, whoever saved it.

    Guarantee: `save` stores nothing in a database that may have lost what was processed since the state before:
    one that was restored, or failed over to. The holder goes back to what `load` returns there.
    """

    @property
    def lease_s(self) -> float:
        """How long `acquire` holds, in seconds."""
        ...

    def acquire(self) -> bool:
        """Take or renew the lease; False if another process holds it, or the state is not what was loaded or saved."""
        ...

    def load(self) -> str | None: ...
    def save(self, state: str) -> bool:
        """Store the state; False if the lease was lost, or another state is there, and nothing is stored."""
        ...

    def release(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Anchor:
    """How far one partition's work has got in the database, and which database said so.

    Args:
        position: everything below it is committed there; None if no position is stored.
        history: changes when commits may be missing even though the position is not: on another
            server, or after the database was restarted or restored.
    """

    position: int | None
    history: str

    def is_missing_in(self, later: Anchor) -> bool:
        """Whether the database may have lost commits since this anchor was read."""
        if self.history != later.history:
            return True
        return self.position is not None and (
            later.position is None or later.position < self.position
        )


class Anchors(Protocol):
    """Positions kept in the database. Any process may read and advance them. Methods raise StoreError.

    Guarantee: a stored position never goes back, unless the whole database does.
    """

    def read(self, names: Sequence[str]) -> Mapping[str, Anchor]:
        """Return the anchor for each name."""
        ...

    def advance(self, moves: Mapping[str, tuple[int, Anchor]]) -> Mapping[str, Anchor]:
        """Store positions in a transaction of their own; returns the anchors as they are afterwards.

        Args:
            moves: name → the new position, and the anchor known before the messages in between were
                committed. If the database no longer has that anchor, nothing is stored.
        """
        ...


@runtime_checkable
class Anchored(Protocol):
    """A Progress that keeps anchors too, as a worker's does."""

    @property
    def anchors(self) -> Anchors: ...


class Context(Protocol):
    """What a worker gives to a consumer."""

    @property
    def progress(self) -> Progress:
        """For a source without a broker that remembers its position."""
        ...

    def settled(self, among: Callable[[Delivery], bool], within_s: float) -> Sequence[Delivery]:
        """Wait until all matching in-flight deliveries are done, or the time is up; returns those done.

        For a consumer that is about to lose them (a partition is revoked). It must acknowledge what is
        returned now; `settle` will not be called for it.
        """
        ...

    def report(self, event: Event) -> None:
        """Tell the app's observers what only the consumer can see, such as `MessagesLost`."""
        ...


class Source(ABC):
    """Where deliveries come from: a description that never changes. What is open is a `Consumer`.

    Attributes:
        name: identifies the source to people and in metrics. Stable across restarts: progress is kept under it.
        topics: the only ones it can deliver; None if it delivers whatever it is asked for.
        tend_every_s, redelivery_s: of its consumers, as far as they are known without asking the broker.
        one_process: why only one process may consume it; None if any number may.
        rewinds: it reads again what a failover or a restore of the database has lost.
    """

    name: str
    topics: Sequence[str] | None = None
    tend_every_s: float | None = None
    redelivery_s: float | None = None
    one_process: str | None = None
    rewinds: bool = False

    def keeps_order(self, topic: str) -> bool:
        """Whether a key's messages go to one consumer at a time, in order (promise 5.1)."""
        return False

    @abstractmethod
    def consumer(self, topics: Sequence[str], context: Context) -> Consumer:
        """Connect, without waiting for messages. A broker that is away is not an error, see `later_if_away`.

        May be called any number of times: consumers share nothing.

        Args:
            topics: what to deliver; "*" means everything. A source that is a single stream may ignore
                it.

        Raises:
            ConfigurationError: it can never work this way. Nothing is left open.
        """


class Consumer(ABC):
    """What is open of a source, until `close`. One thread at a time calls it, but not always the same one.

    A subclass implements only what differs. `receive`, `tend` and `settle` may raise BrokerUnavailable,
    or the StoreError of their progress; they are then called again later. So they are after any other
    exception, with an event. For what a broker refuses, see `refusal`.

    Attributes:
        tend_every_s: how often `tend` must be called at least; None if that is not needed.
        redelivery_s: when the broker hands an unsettled delivery to another consumer; None for never, or not known
            yet. If `tend_every_s` is a number, this is the time without `tend`. Otherwise it is the time since
            delivery, which no run may exceed.
        rested: set before `close` where no handler is at work any more, so that no delivery can end this process.

    Guarantee: after a crash, a delivery that was not settled is delivered again.
    """

    rested = False

    def __init__(self, source: Source) -> None:
        self.name = source.name
        self.tend_every_s = source.tend_every_s
        self.redelivery_s = source.redelivery_s

    @property
    def exhausted(self) -> bool:
        """Whether it will never deliver anything again. One that follows is never exhausted."""
        return False

    @abstractmethod
    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        """Return what has arrived, up to `messages_max`; wait at most `wait_s` seconds for the first.

        The first `messages_max` is the most that will ever be in flight. While deliveries are in flight,
        `wait_s` is zero and `receive` is called up to 2,000 times a second.
        """

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        """Keep what is in flight ours without receiving: extend it, or stay a member of the group.

        Called while handlers run, or the database is away, for longer than the broker waits. The default
        does nothing: the broker either waits indefinitely or offers no extension.
        """
        return

    @abstractmethod
    def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Acknowledge deliveries, in any order. A source with a cursor moves it only past what is settled without gaps.

        Raises:
            BrokerError: `failed` of them were not acknowledged and will be delivered again.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back; what was not settled is left for another consumer."""


@contextmanager
def later_if_away(source: str) -> Generator[None]:
    """Connect at start-up: a broker that is away is waited for, and the first receive reports it."""
    try:
        yield
    except BrokerUnavailable as error:
        _log.debug("%s cannot be opened yet: %s", source, error)


def refusal(sentence: str, *, worked: bool) -> ConfigurationError | BrokerUnavailable:
    """Return the error for what a broker refuses: an outage once it has worked, as somebody may be repairing it."""
    return BrokerUnavailable(sentence) if worked else ConfigurationError(sentence)


def taken(buffer: deque[Entry], count_max: int) -> list[Entry]:
    """Take the oldest entries out of a buffer."""
    return [buffer.popleft() for _ in range(min(count_max, len(buffer)))]


class Publisher(Protocol):
    """Where staged messages are sent. All methods are called from one thread, the relay's.

    Guarantee: a message that `publish` reported as confirmed survives a restart of the broker, if the
    broker's own durability settings provide that. Anything else is sent again under the same id.
    """

    @property
    def name(self) -> str:
        """Identifies the publisher to people and in metrics."""
        ...

    @property
    def event_prefix(self) -> str:
        """The header prefix of CloudEvents attributes in the transport's binding: "ce_", "ce-"…"""
        ...

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        """Send messages and wait for the broker to confirm each; connect first if necessary.

        Args:
            messages: of each topic and key one, unless it is `KeepsRuns`; with `id`, `topic`, `payload`,
                `headers` and, if known, `type`, `key`, `content_type` and `time`. The id is sent as
                `message-id`: natively if the broker has such a property, as a header otherwise.
            within_s: whatever has not been confirmed by then is an error.

        Returns: for each message None if the broker confirmed it, MessageRefused if it can never accept it,
            DestinationRefused if its topic takes nothing now, or another BrokerError if it did not confirm it
            this time.

        Raises:
            BrokerUnavailable: the broker cannot be reached, and no message's fate is known.
        """
        ...

    def close(self) -> None:
        """Close connections. Nothing is pending, because `publish` waits for every answer."""
        ...


@runtime_checkable
class KeepsRuns(Protocol):
    """A publisher that takes runs: several messages of one topic and key in one call, in their order.

    Guarantee: if a message of a run is not confirmed, none behind it has been taken before it: what has arrived
    for the first time is in order, also when the rest is sent again later. Whether a broker can do that:
    docs/decisions/0056-runs-of-a-key.md
    """

    @property
    def keeps_runs(self) -> bool: ...


class Destination(Protocol):
    """What `App.publish` takes: a broker that messages can be sent to."""

    def publisher(self) -> Publisher:
        """Create a publisher with its own connections; does no I/O.

        Raises:
            ConfigurationError: with one of the options, a confirmation would not mean that the message is kept.
        """
        ...


class Batch:
    """The messages of one `publish` call, and what the broker said about each.

    Args:
        broker: its name, for people.
        within_s: unconfirmed is the initial answer; whatever is not answered in time keeps it. From a broker that is
            there, it is the topic's trouble (no leader, too few replicas) unless others of the topic were confirmed.
    """

    def __init__(self, broker: str, messages: Sequence[Message[Any]], within_s: float) -> None:
        self.messages = messages
        self.until = time.monotonic() + within_s
        self._half = self.until - within_s / 2
        #: What is left then is for finding out whether the broker is there at all.
        self.last_word_s = min(LAST_WORD_S, within_s / 4)
        unconfirmed = {
            topic: BrokerError(f"{broker} has not confirmed the message for {topic!r} within {within_s:g} s.")
            for topic in {message.topic for message in messages}
        }  # fmt: skip
        self.answers: list[BrokerError | None] = [
            unconfirmed[message.topic] for message in messages
        ]
        self._unconfirmed = list(self.answers)
        #: The broker has answered for at least one message, so it is reachable.
        self.heard = False
        #: Why the broker could not be reached.
        self.away: BrokerUnavailable | None = None
        self._stopped: dict[tuple[str, str | None], int] = {}

    def left_s(self) -> float:
        return max(0.0, self.until - time.monotonic())

    def entries(
        self, entry_of: Callable[[Message[Any]], Entry], topic: str | None = None
    ) -> Iterator[tuple[int, Entry]]:
        """Yield each message (or those of one topic) in the client's form, with its index.

        A message that cannot be converted gets its refusal as the answer instead, and stops its key.
        """
        for at, message in enumerate(self.messages):
            if (topic is None or message.topic == topic) and not (
                self._stopped and self.is_behind(at)
            ):
                try:
                    entry = entry_of(message)
                except MessageRefused as refusal:
                    self.answers[at] = refusal
                    self.stop(at)
                except Exception as error:
                    if not is_contents(error):
                        raise
                    why = f"{type(error).__name__}: {error} (boundary: {Boundary.PUBLISH})"
                    self.answers[at] = BrokerError(f"The message cannot be written: {why}.")
                    self.stop(at)
                else:
                    yield at, entry

    def stop(self, at: int) -> None:
        """Let no later message of its key be sent."""
        message = self.messages[at]
        if message.key is not None:
            run = message.topic, message.key
            self._stopped[run] = min(at, self._stopped.get(run, at))

    def is_behind(self, at: int) -> bool:
        """Whether an earlier message of its key was stopped; this one is answered so, and must not be sent."""
        message = self.messages[at]
        if self._stopped.get((message.topic, message.key), at) >= at:
            return False
        self.answers[at] = NotTried("An earlier message of its key was not sent.")
        return True

    def is_open(self, at: int) -> bool:
        """Whether a message has no answer yet, and none of its key is stopped before it."""
        return self.answers[at] is self._unconfirmed[at] and not self.is_behind(at)

    def may_follow(self, at: int) -> bool:
        """Whether a message may be sent now that the one before it in its key is confirmed.

        In the second half of the time it is left to the next call, and so is what is behind it: a slow broker would not
        confirm all of a long run in time.
        """
        if self.is_behind(at):
            return False
        if time.monotonic() < self._half:
            return True
        self.answers[at] = NotTried("There is no time left for another message of its key.")
        self.stop(at)
        return False

    def answer(self, at: int, error: BrokerError | None) -> None:
        """Record the broker's answer to a message; None if it is confirmed, or else its key stops."""
        self.heard = True
        self.answers[at] = error
        if error is not None:
            self.stop(at)

    def lose(self, sentence: str, cause: BaseException | None = None) -> None:
        """Record that the broker cannot be reached."""
        self.away = BrokerUnavailable(sentence)
        self.away.__cause__ = cause

    def outcome(self) -> list[BrokerError | None]:
        """Return the answers so far; what is abandoned may still write into its own list.

        Raises:
            BrokerUnavailable: the broker is away, and has answered for no message.
        """
        if self.away is not None and not self.heard:
            raise self.away
        answers = list(self.answers)
        if self.away is None and any(map(operator.is_, answers, self._unconfirmed)):
            confirmed = {
                message.topic
                for message, answer in zip(self.messages, answers, strict=True)
                if answer is None
            }
            for at, message in enumerate(self.messages):
                if answers[at] is self._unconfirmed[at] and message.topic not in confirmed:
                    answers[at] = DestinationRefused(str(answers[at]))
        return answers


def run_of(message: Message[Any], at: int) -> tuple[str, str] | int:
    """Return what the messages of a run have in common; one without a key is alone."""
    return at if message.key is None else (message.topic, message.key)


def parts(
    entries: Iterable[tuple[int, Entry]],
    size_of: Callable[[Entry], int],
    count_max: int,
    bytes_max: int,
) -> Iterator[list[tuple[int, Entry]]]:
    """Split what `Batch.entries` yields, in order, into parts of limited count and size; one may exceed the size."""
    part: list[tuple[int, Entry]] = []
    bytes_in_part = 0
    for entry in entries:
        size = size_of(entry[1])
        if part and (len(part) == count_max or bytes_in_part + size > bytes_max):
            yield part
            part, bytes_in_part = [], 0
        part.append(entry)
        bytes_in_part += size
    if part:
        yield part


def refuse(given: Iterable[str], refused: Mapping[str, str], sentence: str) -> None:
    """Raise ConfigurationError for an option that users may not set.

    Args:
        refused: each such option, and why.
        sentence: a template with {option} and {why}.
    """
    for option in given:
        if option in refused:
            raise ConfigurationError(sentence.format(option=option, why=refused[option]))
