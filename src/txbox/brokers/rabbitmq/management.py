"""The settings of queues, from the HTTP API of RabbitMQ's management plugin."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from typing import Any, cast
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urlsplit
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from yarl import URL

from txbox.brokers.base import Facts
from txbox.errors import BrokerUnavailable, ConfigurationError

_CALL_S = 10.0
_SERVER_LIMITS = (
    "The API does not show the server's own limits: see consumer_timeout in `rabbitmqctl environment`. A quorum queue "
    "gives up after 20 deliveries by default from RabbitMQ 4.0 on. There, x-delivery-limit -1 means no limit; on older "
    "servers it deletes a message that comes back once."
)


def examine(management: str, broker: URL, queues: Sequence[str]) -> list[Facts]:
    """Ask for the settings of queues in the broker's virtual host.

    Args:
        management: "http://user:password@host:15672".

    Raises:
        BrokerUnavailable: nothing answers, or something else does.
        ConfigurationError: the API refuses this user.
    """
    host = quote(unquote(broker.raw_path.removeprefix("/")) or "/", safe="")
    found = {
        queue: _get(management, f"/api/queues/{host}/{quote(queue, safe='')}") for queue in queues
    }
    return [
        Facts(topic=queue, found=False) if settings is None else _facts(queue, settings)
        for queue, settings in found.items()
    ]


class _StaysHere(HTTPRedirectHandler):
    """Follows no redirect: the password would go along."""

    def redirect_request(self, *_: Any, **named: Any) -> None:
        return None


def _get(management: str, path: str) -> Mapping[str, Any] | None:
    parts = urlsplit(management)
    user = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
    where = parts.netloc.rpartition("@")[2]
    request = Request(
        f"{parts.scheme}://{where}{parts.path.rstrip('/')}{path}",
        headers={"Authorization": "Basic " + base64.b64encode(user.encode()).decode()},
    )
    try:
        # no proxy: it would see the password
        with build_opener(ProxyHandler({}), _StaysHere).open(request, timeout=_CALL_S) as answer:
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


def _facts(queue: str, settings: Mapping[str, Any]) -> Facts:
    # an empty policy is a list
    policy: Mapping[str, Any] = settings.get("effective_policy_definition") or {}
    arguments: Mapping[str, Any] = settings.get("arguments") or {}
    said: dict[str, str] = {}

    def limit(*names: str, of: str) -> int | None:
        """Return the lowest of the limits set by arguments and policy: that one applies."""
        found = [
            (int(value), shown)
            for name in names
            for value, shown in (
                (arguments.get(f"x-{name}"), f"x-{name}"),
                (policy.get(name), f"{name} of its policy"),
            )
            # a delivery limit of -1 is none
            if value is not None and int(value) >= 0
        ]
        if not found:
            return None
        least, shown = min(found)
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
