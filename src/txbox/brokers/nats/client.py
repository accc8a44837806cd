"""The NATS client, with all headers of a message, whatever bytes they hold."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import nats.aio.client
import nats.errors

_log = logging.getLogger("txbox")

Connected = TypeVar("Connected", bound="Client")

#: Errors that waiting can cure: no server, no leader, a connection lost meanwhile.
TROUBLE = (nats.errors.Error, OSError, TimeoutError)


class RawHeaders(dict[str, str]):
    """Empty for the client; `pairs` has the headers as received, including repeats and bytes that are not text."""

    def __init__(self, pairs: Sequence[tuple[str, str | bytes]]) -> None:
        super().__init__()
        self.pairs = pairs


class Client(nats.aio.client.Client):
    """The nats-py client, which would otherwise drop all headers of a message if it cannot parse one."""

    async def _process_headers(self, headers: Any) -> Any:
        if headers and not bytes(headers).startswith(b"NATS/1.0\r\n"):
            # a status sent by the server
            return await super()._process_headers(headers)  # pyright: ignore[reportUnknownMemberType]  # untyped there
        return RawHeaders(_pairs(bytes(headers))) if headers else None


def _pairs(raw: bytes) -> list[tuple[str, str | bytes]]:
    pairs: list[tuple[str, str | bytes]] = []
    for line in raw.split(b"\r\n")[1:]:
        name, colon, value = line.partition(b":")
        if colon:
            pairs.append((name.decode(errors="backslashreplace"), _text(value.strip())))
    return pairs


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


async def connect(
    servers: Sequence[str], options: Mapping[str, Any], make: Callable[[], Connected]
) -> Connected:
    """Connect a new client to one of the servers.

    Raises:
        nats.errors.Error: the last server's answer.
        OSError: the last server cannot be reached.
    """
    failure: Exception | None = None
    for server in random.sample(list(servers), len(servers)):
        client: Any = make()
        try:
            # a subscription that survived a reconnect can fall silent, so every connection gets new ones
            await client.connect(
                servers=[server], **{"error_cb": _noted, **options},
                allow_reconnect=False, max_reconnect_attempts=1, reconnect_time_wait=0.1,
            )  # fmt: skip
        except TROUBLE as error:
            failure = error
            await client.close()
        else:
            connection: Connected = client
            return connection
    assert failure is not None
    raise failure


async def _noted(error: Exception) -> None:
    _log.debug("NATS: %r", error)
