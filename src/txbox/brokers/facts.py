"""What a broker is set to, topic by topic, for `txbox doctor`: each answers in its words, `Facts` says it in ours.

A source's `examine` asks; what the answer means is here. `admin/doctor/app.py` compares it with what the App needs.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, Protocol, cast, runtime_checkable
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from txbox.errors import BrokerUnavailable, ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A broker's own settings for one topic. None means unknown, or that the broker has no such setting.

    Args:
        found: False when the broker has no such topic, stream or queue.
        replay_s: how long acknowledged messages can be replayed on request; infinite if unlimited.
        kept_s: after how long messages that were never received are dropped.
        redelivery_s: after how long an unacknowledged message is delivered to another consumer.
        deliveries_max: after how many deliveries a message is given up.
        acknowledged: False if delivering a message also acknowledges it.
        durable: False if waiting messages are lost when the broker restarts.
        overflows: True if the oldest messages are dropped once there are too many.
        duplicates_s: how long the broker recognises a message that is published again.
        said: field → the settings it comes from, under the broker's own names.
        unknown: what the broker does not show, and why; a sentence each.
    """

    topic: str
    found: bool = True
    replay_s: float | None = None
    kept_s: float | None = None
    redelivery_s: float | None = None
    deliveries_max: int | None = None
    acknowledged: bool = True
    durable: bool = True
    overflows: bool = False
    duplicates_s: float | None = None
    said: Mapping[str, str] = field(default_factory=dict[str, str])
    unknown: tuple[str, ...] = ()


@runtime_checkable
class Examinable(Protocol):
    """A source or destination whose broker can be asked for its settings."""

    def examine(self, topics: Sequence[str]) -> Sequence[Facts]:
        """Ask for the settings of each topic, on a connection of its own. Changes and receives nothing.

        Raises:
            BrokerUnavailable: the broker does not answer.
            ConfigurationError: the broker refuses this user or these options.
        """
        ...


def of_kafka(topic: str, settings: Mapping[str, str] | str | None) -> Facts:
    """What the settings of a topic mean.

    Args:
        settings: None if there is no such topic; a text says why this user may not see them.
    """
    if settings is None:
        return Facts(topic=topic, found=False)
    if isinstance(settings, str):
        why = f"this user may not see its settings ({settings}): allow DescribeConfigs."
        return Facts(topic=topic, unknown=(why,))
    kept_ms, segment_ms = float(settings["retention.ms"]), float(settings["segment.ms"])
    compacted = "compact" in settings["cleanup.policy"]
    bounded = kept_ms >= 0 and "delete" in settings["cleanup.policy"]
    said = f"retention.ms={kept_ms:.0f}, segment.ms={segment_ms:.0f}"
    return Facts(
        topic=topic,
        # a segment goes as a whole, when its last record is old enough
        replay_s=(kept_ms + segment_ms) / 1000 if bounded else math.inf,
        kept_s=kept_ms / 1000 if bounded else None,
        said={
            "replay_s": f"cleanup.policy={settings['cleanup.policy']}, {said}"
            if compacted
            else said,
            "kept_s": f"retention.ms={kept_ms:.0f}",
        },
    )


def of_nats(
    topic: str, stream: Any, consumer: Any | None, *, redelivery_s: float, acknowledged: bool
) -> Facts:
    """What the settings of a stream and of its consumer mean, if there is one."""
    age_s = float(stream.max_age or 0.0) or math.inf
    # what everybody has acknowledged is gone from the others
    replayed = str(getattr(stream.retention, "value", stream.retention)) in ("None", "limits")
    most, policy = None, None
    if consumer is not None:
        most, policy = consumer.max_deliver, consumer.ack_policy
    aged = f"stream {stream.name}: max_age={0 if math.isinf(age_s) else age_s:g} s"
    return Facts(
        topic=topic,
        replay_s=age_s if replayed else None,
        kept_s=None if math.isinf(age_s) else age_s,
        redelivery_s=redelivery_s,
        deliveries_max=most if most is not None and most > 0 else None,
        acknowledged=acknowledged,
        duplicates_s=float(stream.duplicate_window or 0.0) or None,
        said={
            "replay_s": aged,
            "kept_s": aged,
            "redelivery_s": f"ack_wait={redelivery_s:g} s",
            "deliveries_max": f"max_deliver={most}",
            "acknowledged": f"ack_policy={getattr(policy, 'value', policy)}",
            "duplicates_s": f"stream {stream.name}: duplicate_window={stream.duplicate_window:g} s",
        },
    )


def of_redis(client: Any, stream: str, claim_idle_s: float, *, clock_ms_min: int) -> Facts:
    """Return how far back a stream can be replayed. A missing one is no problem: reading creates it.

    Args:
        clock_ms_min: a smaller id is not from the server's clock.
    """
    replay_s: float | None = None
    said = {"redelivery_s": f"claim_idle={claim_idle_s:g} s"}
    unknown: tuple[str, ...] = ()
    if entries := client.xrange(stream, count=1):
        seconds, microseconds = client.time()
        entry_id = entries[0][0].decode()
        stored_ms = int(entry_id.partition("-")[0])
        if stored_ms >= clock_ms_min:
            replay_s = max(0.0, seconds + microseconds / 1e6 - stored_ms / 1000)
            said["replay_s"] = f"XLEN {client.xlen(stream)}, oldest entry {entry_id}"
        else:
            unknown = (f"its ids come from the producer ({entry_id}) and do not contain a time.",)
    return Facts(
        topic=stream, replay_s=replay_s, redelivery_s=claim_idle_s, said=said, unknown=unknown
    )


def of_sqs(topic: str, known: Mapping[str, str], *, visible_s: int | None) -> Facts:
    """What the attributes of a queue mean.

    Args:
        visible_s: as the source asks for; None leaves it to the queue.
    """
    kept = known.get("MessageRetentionPeriod")
    kept_s = None if kept is None else float(kept)
    most = json.loads(known.get("RedrivePolicy", "{}")).get("maxReceiveCount")
    said = f"MessageRetentionPeriod={kept}"
    return Facts(
        topic=topic,
        # a message whose deletion failed can come again until then
        replay_s=kept_s,
        kept_s=kept_s,
        redelivery_s=float(visible_s or known["VisibilityTimeout"]),
        deliveries_max=None if most is None else int(most),
        said={
            "replay_s": said,
            "kept_s": said,
            "redelivery_s": "visibility="
            if visible_s
            else f"VisibilityTimeout={known['VisibilityTimeout']}",
            "deliveries_max": f"maxReceiveCount={most}",
        },
        unknown=() if kept is not None else ("the server does not report MessageRetentionPeriod.",),
    )


# -- RabbitMQ: the HTTP API of its management plugin -------------------------------------------

_API_CALL_S = 10.0
_AMQP_CANNOT_TELL = (
    "AMQP does not show time to live, lengths, delivery limit or durability: set RabbitMQ(management=…), or see "
    "`rabbitmqctl list_queues name durable arguments effective_policy_definition`."
)
_SERVER_LIMITS = (
    "The API does not show the server's own limits: see consumer_timeout in `rabbitmqctl environment`. A quorum queue "
    "gives up after 20 deliveries by default from RabbitMQ 4.0 on. There, x-delivery-limit -1 means no limit; on older "
    "servers it deletes a message that comes back once."
)


def of_rabbitmq(management: str, path: str, queues: Sequence[str]) -> list[Facts]:
    """Ask for the settings of queues in the broker's virtual host.

    Args:
        management: "http://user:password@host:15672".
        path: of the broker's URL, as it is written there: the virtual host.

    Raises:
        BrokerUnavailable: nothing answers, or something else does.
        ConfigurationError: the API refuses this user.
    """
    host = quote(unquote(path.removeprefix("/")) or "/", safe="")
    described = {
        queue: _asked(management, f"/api/queues/{host}/{quote(queue, safe='')}") for queue in queues
    }
    return [
        Facts(topic=queue, found=False) if settings is None else _of_queue(queue, settings)
        for queue, settings in described.items()
    ]


def of_amqp(queue: str, *, found: bool) -> Facts:
    """What AMQP tells of a queue: whether it exists."""
    return Facts(topic=queue, found=found, unknown=(_AMQP_CANNOT_TELL,) if found else ())


class _StaysHere(HTTPRedirectHandler):
    """Follows no redirect: the password would go along."""

    def redirect_request(self, *_: Any, **named: Any) -> None:
        return None


def _asked(management: str, path: str) -> Mapping[str, Any] | None:
    parts = urlsplit(management)
    user = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
    where = parts.netloc.rpartition("@")[2]
    request = Request(
        f"{parts.scheme}://{where}{parts.path.rstrip('/')}{path}",
        headers={"Authorization": "Basic " + base64.b64encode(user.encode()).decode()},
    )
    try:
        # no proxy: it would see the password
        with build_opener(ProxyHandler({}), _StaysHere).open(
            request, timeout=_API_CALL_S
        ) as answer:
            settings: Any = json.load(answer)
    except HTTPError as error:
        if error.code == 404:
            return None
        if error.code in (401, 403):
            raise ConfigurationError(
                f"The HTTP API of RabbitMQ at {where} refuses this user ({error.code}): give it the tag monitoring."
            ) from error
        raise BrokerUnavailable(
            f"The HTTP API of RabbitMQ at {where} answered {error.code}."
        ) from error
    except (OSError, HTTPException, ValueError) as error:
        raise BrokerUnavailable(
            f"The HTTP API of RabbitMQ at {where} cannot be reached ({type(error).__name__})."
        ) from error
    if not isinstance(settings, dict):
        raise BrokerUnavailable(
            f"Something other than the HTTP API of RabbitMQ answers at {where}."
        )
    return cast("Mapping[str, Any]", settings)


def _of_queue(queue: str, settings: Mapping[str, Any]) -> Facts:
    # an empty policy is a list
    policy: Mapping[str, Any] = settings.get("effective_policy_definition") or {}
    arguments: Mapping[str, Any] = settings.get("arguments") or {}
    said: dict[str, str] = {}

    def limit(*names: str, of: str) -> int | None:
        """Return the lowest of the limits set by arguments and policy: that one applies."""
        limits = [
            (int(value), shown)
            for name in names
            for value, shown in (
                (arguments.get(f"x-{name}"), f"x-{name}"),
                (policy.get(name), f"{name} of its policy"),
            )
            # a delivery limit of -1 is none
            if value is not None and int(value) >= 0
        ]
        if not limits:
            return None
        least, shown = min(limits)
        said[of] = f"{shown} {least}{to}"
        return least

    dead_letters = arguments.get("x-dead-letter-exchange", policy.get("dead-letter-exchange"))
    to = "" if dead_letters is None else f", and from there to the exchange {dead_letters!r}"
    kept_ms = limit("message-ttl", "expires", of="kept_s")
    length = limit("max-length", "max-length-bytes", of="overflows")
    refuses = "reject-publish" in str(arguments.get("x-overflow", policy.get("overflow", "")))
    deliveries = limit("delivery-limit", of="deliveries_max")
    timeout_ms = limit("consumer-timeout", of="redelivery_s")
    passing = [name for name in ("exclusive", "auto_delete") if settings.get(name)]
    if not settings.get("durable", True):
        passing.append("not durable")
    said["durable"] = ", ".join(passing)
    return Facts(
        topic=queue,
        kept_s=None if kept_ms is None else kept_ms / 1000,
        overflows=length is not None and not refuses,
        deliveries_max=deliveries,
        redelivery_s=None if timeout_ms is None else timeout_ms / 1000,
        durable=not passing,
        said=said,
        unknown=(_SERVER_LIMITS,),
    )
