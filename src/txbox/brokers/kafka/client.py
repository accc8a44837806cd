"""The librdkafka client: the options Kafka(…) passes to it, its error codes and log, and questions about topics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigSource,
)
from confluent_kafka.admin._resource import ResourceType

from txbox.boundaries import log as _log
from txbox.brokers.base import refuse
from txbox.errors import BrokerUnavailable, ConfigurationError

ASK_S = 5.0
#: how often a member looks whether its topics are still the same
LOOK_S = 5.0
# an answer that takes longer may be waiting for a controller
_CONTROLLER_S = 0.5
_INTERNAL = "__"
_DEFAULTS = {
    "auto.offset.reset": "earliest",
    "isolation.level": "read_committed",
    # control records end a transaction: the offset behind them shows only there
    "enable.partition.eof": True,
    # the synchronous commit when partitions are released waits this long for a broker that hangs
    "socket.timeout.ms": 10_000,
}
#: The only options of librdkafka and its Python client that are spelt with underscores.
_UNDERSCORED = {"log_level", "error_cb", "stats_cb", "throttle_cb", "oauth_cb", "logger"}
_STRATEGY = "partition.assignment.strategy"
_FORCED = {
    "enable.auto.commit": "txbox commits offsets itself, and only of what is stored",
    "enable.auto.offset.store": "txbox commits offsets itself, and only of what is stored",
}
_REFUSED = {
    "bootstrap.servers": "it is the first argument of Kafka(…)",
    "group.id": "it is group= of Kafka(…)",
    "on_commit": "txbox handles the results of its own commits",
    "auto.commit.interval.ms": "txbox commits on its own schedule",
}
_SHARE_DEFAULTS = {
    "socket.timeout.ms": 10_000,
    # a wish: Kafka hands out whole batches as they were produced
    "max.poll.records": 100,
}
#: What a share group is set to unless somebody has decided otherwise: a new group misses nothing, and what a producer's
#: transaction has taken back does not come.
_GROUP_DEFAULTS = {
    "share.auto.offset.reset": "earliest",
    "share.isolation.level": "read_committed",
}
_SHARE_REFUSED = {
    "auto.offset.reset": "a share group has share.auto.offset.reset",
    "isolation.level": "a share group has share.isolation.level",
    "share.acknowledgement.mode": "txbox acknowledges messages itself, and only what is stored",
    "group.instance.id": "members of a share group are never static",
    "group.protocol": "share groups have their own",
    "group.remote.assignor": "each member may get messages of every partition",
    "partition.assignment.strategy": "each member may get messages of every partition",
    "session.timeout.ms": "a share group has share.session.timeout.ms",
    "heartbeat.interval.ms": "a share group has share.heartbeat.interval.ms",
    "enable.partition.eof": "a share group has no position to report",
}
_PRODUCER_DEFAULTS: dict[str, Any] = {
    # as the JVM clients do: a key maps to one partition, whoever publishes it
    "partitioner": "murmur2_random",
    # the topic's max.message.bytes decides, not the client's 1 MB; a broker closes connections that send over 100 MB
    "message.max.bytes": 64 * 1024 * 1024,
    # a missing topic is reported within this time, instead of only when the message times out
    "topic.metadata.propagation.max.ms": 3_000,
}
_GAPLESS = "enable.gapless.guarantee"
_PRODUCER_FORCED: dict[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    # a message that fails for good ends the producer instead of being passed by those behind it
    _GAPLESS: True,
    # what runs out of time alone would be passed, too: all of a call are given up together
    "message.timeout.ms": 0,
}
#: The time of a call decides instead: `RelayPolicy.confirm_within`.
_PRODUCER_DROPPED = ("message.timeout.ms", "delivery.timeout.ms")
#: Options under any of these names, the values that keep a confirmation true, and why.
_PRODUCER_NEEDS: tuple[tuple[tuple[str, ...], Callable[[str], bool], str], ...] = (
    (
        ("acks", "request.required.acks"), lambda value: value in ("all", "-1"),
        "must be all: a message confirmed by a single broker can be lost with it",
    ),
    (
        ("enable.idempotence",), lambda value: value == "true",
        "must be true: without it, retries inside the client change the order",
    ),
    (
        ("retries", "message.send.max.retries"), lambda value: int(value) >= 1,
        "must be 1 or more: an idempotent producer needs it",
    ),
    (
        ("max.in.flight", "max.in.flight.requests.per.connection"), lambda value: 1 <= int(value) <= 5,
        "must be 1 to 5: an idempotent producer needs it",
    ),
)  # fmt: skip
#: What only a consumer, or only a producer, takes begins with one of these; the other client would warn of it.
_OF_CONSUMERS = (
    "auto.", "check.crcs", "consume.", "coordinator.", "enable.auto.", "enable.partition.eof", "fetch.", "group.",
    "heartbeat.", "isolation.", "max.partition.", "max.poll.", "offset.store.", "partition.assignment.", "queued.",
    "session.", "share.",
)  # fmt: skip
_OF_PRODUCERS = (
    "acks", "batch.", "compression.", "delivery.", "dr_", "enable.gapless.", "enable.idempotence", "linger.",
    "message.send.", "message.timeout.", "on_delivery", "partitioner", "produce.", "queue.buffering.", "queuing.",
    "request.", "retries", "sticky.", "transaction",
)  # fmt: skip
_PRODUCER_REFUSED = {
    "transactional.id": "a Kafka transaction does not include the database's; the inbox handles duplicates",
    "delivery.report.only.error": "confirmations must be reported",
    "dr_cb": "txbox handles delivery reports",
    "dr_msg_cb": "txbox handles delivery reports",
    "on_delivery": "txbox handles delivery reports",
    "queuing.strategy": "messages are sent in order",
}


def checked_options(
    options: Mapping[str, Any], keywords: Mapping[str, Any], *, share: bool = False
) -> dict[str, Any]:
    """Return the options under librdkafka's names, with the defaults of Kafka(…).

    Args:
        share: they are those of a share group, whose own settings are among them: `share.…`.

    Raises:
        ConfigurationError: one of them is not for users to set.
    """
    settings = dict(options)
    for name, value in keywords.items():
        settings[name if name in _UNDERSCORED else name.replace("_", ".")] = value
    refuse(settings, _REFUSED, "Kafka does not take {option}: {why}.")
    for name, why in _FORCED.items():
        if str(settings.pop(name, False)).lower() != "false":
            raise ConfigurationError(f"{name} must be off: {why}.")
        if not share:
            settings[name] = False
    if share:
        refuse(settings, _SHARE_REFUSED, "Kafka(share=True) does not take {option}: {why}.")
        return _SHARE_DEFAULTS | settings
    defaults: dict[str, Any] = dict(_DEFAULTS)
    if str(settings.get("group.protocol", "classic")).lower() != "consumer":
        # the group takes the successor of a static member for the member itself: killed between two steps of a
        # cooperative rebalance, it would not bring about the second, and what it gave up would be nobody's
        static = settings.get("group.instance.id") is not None
        defaults[_STRATEGY] = "roundrobin" if static else "cooperative-sticky"
        if static and "cooperative" in str(settings.get(_STRATEGY, "")):
            raise ConfigurationError(
                f"{_STRATEGY} must not be cooperative together with group.instance.id: partitions that a member "
                "gives up while it is killed would stay nobody's. Omit one of them."
            )
    return defaults | settings


def is_cooperative(options: Mapping[str, Any]) -> bool:
    """Whether a rebalance names only the partitions that come or go."""
    protocol = str(options.get("group.protocol", "classic")).lower()
    return protocol == "consumer" or "cooperative" in str(options.get(_STRATEGY))


def leaves_by_request(options: Mapping[str, Any]) -> bool:
    """Whether a member that closes asks to leave: static ones stay, those of KIP-848 leave with a heartbeat."""
    protocol = str(options.get("group.protocol", "classic")).lower()
    return protocol != "consumer" and options.get("group.instance.id") is None


def producer_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the producer's options among those of Kafka(…), with its defaults.

    Raises:
        ConfigurationError: with one of them, a confirmation would not mean that the message is kept.
    """
    refuse(settings, _PRODUCER_REFUSED, "Kafka does not publish with {option}: {why}.")
    for names, is_fine, rule in _PRODUCER_NEEDS:
        for name in names:
            if name in settings and not is_fine(str(settings[name]).lower()):
                raise ConfigurationError(f"{name} {rule}.")
    kept = {
        name: value
        for name, value in settings.items()
        if not name.startswith(_OF_CONSUMERS) and name not in _PRODUCER_DROPPED
    }
    return {**_PRODUCER_DEFAULTS, **kept, **_PRODUCER_FORCED}


def consumer_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the consumer's options among those of Kafka(…)."""
    return {name: value for name, value in settings.items() if not name.startswith(_OF_PRODUCERS)}


_SHARED = (
    "bootstrap.", "security.", "sasl.", "ssl.", "socket.", "client.", "broker.", "enable.ssl",
    "oauth_cb", "metadata.", "https.",
)  # fmt: skip

# The group has moved on. Which partitions are gone is reported by on_revoke and on_lost, not by these errors:
# if we forgot a partition that stays ours, a later commit would skip what is in flight.
MOVED_ON = {
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.REBALANCE_IN_PROGRESS,
    KafkaError.STALE_MEMBER_EPOCH,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError._STATE,  # noqa: SLF001
    KafkaError._ASSIGNMENT_LOST,  # noqa: SLF001
    KafkaError._NO_OFFSET,  # noqa: SLF001
    KafkaError.UNKNOWN_TOPIC_OR_PART,
}
# the client's own codes are public, even though their names start with an underscore
PARTITION_EOF = KafkaError._PARTITION_EOF  # noqa: SLF001
MAX_POLL_EXCEEDED = KafkaError._MAX_POLL_EXCEEDED  # noqa: SLF001
ALL_BROKERS_DOWN = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001
#: An error that is delivered as a message does not say that it is fatal.
FATAL = {KafkaError._AUTO_OFFSET_RESET, KafkaError._FATAL}  # noqa: SLF001
_FORBIDDEN = {
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}
_TOO_OLD = {KafkaError.UNSUPPORTED_VERSION, KafkaError._UNSUPPORTED_FEATURE}  # noqa: SLF001
_BAD_SETTINGS = {KafkaError.INVALID_CONFIG, KafkaError.INVALID_REQUEST}
_NO_TOPIC = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID}
#: Not the business of a single connection: somebody must change rights, passwords or settings.
REFUSALS = {
    *_FORBIDDEN,
    KafkaError.OFFSET_METADATA_TOO_LARGE,
    KafkaError.SASL_AUTHENTICATION_FAILED,
    KafkaError._AUTHENTICATION,  # noqa: SLF001
}

#: Lines of librdkafka's log that repeat what its errors say, many times a second while a broker is away.
_SAID_BY_ERRORS = frozenset({"FAIL", "ERROR", "FATAL", "REQTMOUT", "GETPID"})
#: Of share groups: that they are a preview, of every client; and what failed, as often as it is tried again.
_SHARE_FETCH = "SHAREFETCH"
_OF_SHARES = frozenset({"SHARECONSUMER", "SHAREACK", _SHARE_FETCH})


class ClientLog:
    """librdkafka's log, forwarded to the logger `txbox.kafka`; passed to a client as `logger=`."""

    _log = logging.getLogger("txbox.kafka")

    def __init__(self) -> None:
        #: It has said that it reads on elsewhere than where it was, which no error says. Whoever acts on it resets it.
        self.jumped = False
        #: How many fetches of a share group have failed as a whole, which no error says. Whoever acts on it resets it.
        self.failed_fetches = 0

    def log(self, level: int, text: str, facility: str, *more: str) -> None:
        if facility == "CONFWARN" and any(_GAPLESS in part for part in more):
            # that it is experimental, of every producer
            return
        self.jumped = self.jumped or facility == "OFFSET"
        self.failed_fetches += facility == _SHARE_FETCH
        known = facility in _SAID_BY_ERRORS or facility in _OF_SHARES
        self._log.log(logging.DEBUG if known else level, text, facility, *more)


def text_of(error: BaseException) -> str:
    if isinstance(error, KafkaException):
        return str(error.args[0].str())
    return str(error) or type(error).__name__


# -- questions to the cluster about topics --------------------------------------------------------------


def admin(settings: Mapping[str, Any]) -> Any:
    """Create an admin client from the options of Kafka(…) that it takes, too."""
    options = {name: value for name, value in settings.items() if name.startswith(_SHARED)}
    return AdminClient(options, logger=ClientLog())


class TopicIds:
    """The UUIDs of topics, by which a topic differs from a deleted one of its name.

    Attributes:
        outdated: the present client has heard of a deleted topic of that name. librdkafka (2.16) keeps the leader
            epochs of the deleted one, takes the lower ones of the new one for old news, and never reads it.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        # kept between questions: a client that is garbage collected never answers
        self._admin: Any = None
        self._asked: dict[str, Future[Any]] = {}
        self._look_at = 0.0
        self._hidden: set[str] = set()
        # the first one that was heard of, and that of the present client
        self._first: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self.outdated = False

    def is_another(self, topic: str, uuid: str | None) -> bool:
        """Whether a topic is not the one that was first heard of."""
        return uuid is not None and self._first.get(topic, uuid) != uuid

    def renew(self, topics: Iterable[str]) -> None:
        """There is a new client, and it is about to hear of these topics: note which ones they are before it does.

        Raises:
            BrokerUnavailable: no broker answers.
        """
        self._known.clear()
        # what was asked before is of the client before
        self._asked, self.outdated = {}, False
        self.ask(topics)

    def ask(self, topics: Iterable[str]) -> dict[str, str | None]:
        """Return the UUIDs of those topics that exist; None where the brokers are too old to have them, or hide them.

        Raises:
            BrokerUnavailable: no broker answers.
        """
        asked = self._request(topics)
        if wait(asked.values(), _CONTROLLER_S).not_done:
            cluster = _cluster(self._admin)
            if cluster.controller_id not in cluster.brokers:
                # only the controller is asked; messages can be read without one
                return dict.fromkeys(asked)
        return self._answers(asked)

    def check(self, topics: Iterable[str]) -> dict[str, str | None]:
        """Ask every few seconds without waiting; returns the answers once, in a call after they have come."""
        if self._asked:
            if not all(future.done() for future in self._asked.values()):
                return {}
            asked, self._asked = self._asked, {}
            try:
                return self._answers(asked)
            except BrokerUnavailable as error:
                _log.debug("It is not known whether topics are the same: %s", error)
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_S
            self._asked = self._request(topics)
        return {}

    def close(self) -> None:
        self._admin, self._asked = None, {}

    def _request(self, topics: Iterable[str]) -> dict[str, Future[Any]]:
        names = sorted(set(topics))
        if not names:
            return {}
        if self._admin is None:
            self._admin = admin(self._config)
        # its log and its oauth_cb are served here
        self._admin.poll(0)
        asked: dict[str, Future[Any]] = self._admin.describe_topics(
            TopicCollection(names), request_timeout=ASK_S
        )
        return asked

    def _answers(self, asked: Mapping[str, Future[Any]]) -> dict[str, str | None]:
        uuids: dict[str, str | None] = {}
        for topic, future in asked.items():
            answer = _result_of(future, topic)
            if answer is None:
                continue
            if isinstance(answer, KafkaError):
                if topic not in self._hidden:
                    _log.warning("Kafka does not reveal the UUID of %s: %s", topic, answer.str())
                self._hidden.add(topic)
            uuid = "" if isinstance(answer, KafkaError) else str(answer.topic_id)
            # brokers older than topic ids answer with zeros
            uuids[topic] = uuid if uuid.strip("A=") else None
            if uuid.strip("A="):
                self._first.setdefault(topic, uuid)
                self.outdated |= self._known.setdefault(topic, uuid) != uuid
        return uuids


def settings_of(
    config: Mapping[str, Any], topics: Sequence[str]
) -> dict[str, dict[str, str] | str | None]:
    """Return the settings of topics, or why this user may not see them; None if there is no such topic.

    Args:
        topics: "*" is every one that is not internal.

    Raises:
        BrokerUnavailable: no broker answers.
    """
    asking = admin(config)
    there = _cluster(asking).topics
    if "*" in topics:
        topics = sorted(topic for topic in there if not topic.startswith(_INTERNAL))
    described: dict[str, dict[str, str] | str | None] = dict.fromkeys(topics)
    if wanted := [ConfigResource(ResourceType.TOPIC, topic) for topic in topics if topic in there]:
        for resource, future in asking.describe_configs(wanted, request_timeout=ASK_S).items():
            answer = _result_of(future, resource.name)
            if isinstance(answer, KafkaError):
                described[resource.name] = answer.str()
            elif answer is not None:
                described[resource.name] = {
                    name: str(entry.value) for name, entry in answer.items()
                }
    return described


def set_up_share_group(
    config: Mapping[str, Any], group: str, wanted: Mapping[str, str]
) -> dict[str, str]:
    """Set what a share group is to be set to; returns its settings as they are then.

    Args:
        wanted: settings by name. Those that txbox has a default for, and nobody has set, get it.

    Raises:
        BrokerUnavailable: no broker answers.
        ConfigurationError: this user may not see or change them, or the broker does not take a value.
    """
    asking, resource = admin(config), ConfigResource(ResourceType.GROUP, group)
    (future,) = asking.describe_configs([resource], request_timeout=ASK_S).values()
    entries = _answered(future, group, wanted)
    missing = {
        name: value
        for name, value in (_GROUP_DEFAULTS | dict(wanted)).items()
        if name not in entries
        or entries[name].source == ConfigSource.DEFAULT_CONFIG.value
        or (name in wanted and str(entries[name].value) != value)
    }
    if missing:
        changes = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in missing.items()
        ]
        changed = ConfigResource(ResourceType.GROUP, group, incremental_configs=changes)
        (future,) = asking.incremental_alter_configs([changed], request_timeout=ASK_S).values()
        _answered(future, group, missing)
        _log.info("Kafka: the share group %s has been set to %s", group, _listed(missing))
    return {name: str(entry.value) for name, entry in entries.items()} | missing


def _answered(future: Future[Any], group: str, wanted: Mapping[str, str]) -> Any:
    try:
        return future.result(ASK_S + 1)
    except (KafkaException, TimeoutError) as error:
        code = error.args[0].code() if isinstance(error, KafkaException) else None
        if code in _FORBIDDEN | _TOO_OLD | _BAD_SETTINGS:
            raise ConfigurationError(
                f"The settings of the share group {group} cannot be seen or changed ({text_of(error)}). It needs Kafka "
                "4.2 or later, valid values, and the right to describe and alter the group's configuration; or an "
                f"administrator sets {_listed(_GROUP_DEFAULTS | dict(wanted))} with `kafka-configs.sh --alter "
                f"--entity-type groups --entity-name {group} --add-config …`, and the right to describe is enough."
            ) from error
        raise BrokerUnavailable(
            f"Kafka does not answer for the share group {group} ({text_of(error)})."
        ) from error


def _listed(settings: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in settings.items())


def _cluster(asking: Any) -> Any:
    try:
        return asking.list_topics(timeout=ASK_S)
    except KafkaException as error:
        raise BrokerUnavailable(f"No Kafka broker answers ({text_of(error)}).") from error


def _result_of(future: Any, topic: str) -> Any:
    """Wait for the answer about a topic; a KafkaError if this user may not ask, None if there is no such topic."""
    try:
        return future.result(ASK_S + 1)
    except (KafkaException, TimeoutError) as error:
        if isinstance(error, KafkaException) and error.args[0].code() in _FORBIDDEN | _TOO_OLD:
            return error.args[0]
        if isinstance(error, KafkaException) and error.args[0].code() in _NO_TOPIC:
            return None
        raise BrokerUnavailable(
            f"Kafka does not describe the topic {topic} ({text_of(error)})."
        ) from error
