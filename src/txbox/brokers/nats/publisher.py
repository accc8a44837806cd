"""Publishing to NATS JetStream: pipelined messages, each acknowledged by the stream."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import nats.errors
from nats.aio.msg import Msg
from nats.protocol import command as _command

from txbox.brokers.base import Batch
from txbox.brokers.envelope import NATS, utf8
from txbox.brokers.loop import LAST_WORD_S, LoopPublisher
from txbox.brokers.nats.client import TROUBLE, Client, connect
from txbox.errors import BrokerError, MessageRefused
from txbox.message import Message

_hpub: Any = cast("Any", _command).hpub_cmd  # untyped there
#: Headers with this prefix would make a message expire, replace others or depend on a sequence.
_STEERING = "nats-"
_ID = "nats-msg-id"
#: Any more unconfirmed messages would only queue in the server, which refuses those beyond its limit.
_WINDOW = 1000
#: The subject is part of a protocol line, and the server closes connections that send overlong lines.
_SUBJECT_BYTES_MAX = 1024
_NO_NAME = re.compile(r"[\x00-\x20:\x7f]")
_NO_SUBJECT = re.compile(r"[\x00-\x20\x7f*>]|^\.|\.$|\.\.|^$")
#: The err_code for a message larger than its stream allows.
_TOO_LARGE = frozenset({10054})


class NatsPublisher(LoopPublisher):
    """Publishes to the streams that have the topics among their subjects, and awaits each PubAck.

    A message the stream already has from the last minutes (its duplicate window) is confirmed but not
    stored twice. Header values lose white space at both ends, and None arrives as empty text; values
    with a line break are refused. Headers that begin with `Nats-` steer the server and are left out.

    Guarantee: what is confirmed is in the stream, and as durable as the stream is. To survive a power
    failure it needs file storage, and `sync_interval: always` or several replicas.
    """

    event_prefix = NATS.prefix
    trouble = TROUBLE

    def __init__(self, servers: Sequence[str], options: Mapping[str, Any]) -> None:
        super().__init__(NATS.name, "nats:" + ",".join(map(_without_credentials, servers)))
        self._servers, self._options = servers, options
        self._client: _PublishingClient | None = None

    async def _publish(self, batch: Batch) -> None:
        last_word_s = min(LAST_WORD_S, batch.left_s() / 4)
        client = self._client
        if client is None or not client.is_connected:
            self._client = None
            async with asyncio.timeout(batch.left_s() - last_word_s):
                client = self._client = await connect(
                    self._servers, self._options, _PublishingClient
                )
                await client.listen()
        client.batch = batch
        try:
            async with asyncio.timeout(batch.left_s() - last_word_s):
                await client.send_all(batch)
        except TimeoutError:
            try:
                if not batch.heard:
                    await cast("Any", client).flush(last_word_s)
            finally:
                # the connection's buffer may still hold some, which must not be sent later
                self._disconnect()
        finally:
            client.batch = None

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.cut()


class _PublishingClient(Client):
    """The client, sending headers unchanged and matching acknowledgements to messages by number."""

    batch: Batch | None = None

    async def listen(self) -> None:
        self._inbox = self.new_inbox()
        self._call = 0
        self._waiting: set[int] = set()
        self._changed = asyncio.Event()
        client: Any = self  # partly typed there
        await client.subscribe(
            f"{self._inbox}.*", cb=self._acknowledged, pending_msgs_limit=-1, pending_bytes_limit=-1
        )

    async def send_all(self, batch: Batch) -> None:
        self._call += 1
        self._waiting.clear()
        frames = batch.entries(lambda message: _frame(message, self.max_payload))
        for at, (subject, block, payload) in frames:
            while len(self._waiting) >= _WINDOW:
                await self._flushed()
            self._waiting.add(at)
            # the client's own publish supports neither repeated headers nor bytes
            await self._send_command(
                _hpub(subject, f"{self._inbox}.{self._call}-{at}", block, payload)
            )
        while self._waiting:
            await self._flushed()

    async def _flushed(self) -> None:
        self._changed.clear()
        await self._flush_pending()
        if not self.is_connected:
            raise nats.errors.ConnectionClosedError
        try:
            await asyncio.wait_for(self._changed.wait(), LAST_WORD_S)
        except TimeoutError:
            # time to check the connection again
            return

    async def _acknowledged(self, got: Msg) -> None:
        batch = self.batch
        call, _, number = got.subject.rpartition(".")[2].partition("-")
        if batch is None or int(call) != self._call:
            # belongs to an earlier call that has given up on it
            return
        at = int(number)
        self._waiting.discard(at)
        batch.answer(at, _error_of(got, batch.messages[at].topic))
        self._changed.set()

    def cut(self) -> None:
        """Close the connection without sending what is still buffered."""
        self._pending.clear()
        transport: Any = self._transport
        if transport is not None:
            transport.close()


def _frame(message: Message[Any], bytes_max: int) -> tuple[str, bytearray, bytes]:
    topic = utf8(message.topic)
    if _NO_SUBJECT.search(message.topic) or len(topic) > _SUBJECT_BYTES_MAX:
        raise MessageRefused(
            f"{message.topic!r} is not a valid subject to publish to: use no spaces, wildcards or empty tokens, "
            f"and at most {_SUBJECT_BYTES_MAX} bytes."
        )
    payload = NATS.payload(message)
    block = bytearray(b"NATS/1.0\r\n")
    for name, value in NATS.headers(message):
        if not name.lower().startswith(_STEERING) or name.lower() == _ID:
            _add(block, name, value)
    block += b"\r\n"
    if len(block) + len(payload) > bytes_max:
        raise MessageRefused(
            f"The message has {len(block) + len(payload)} bytes with its headers, but NATS allows "
            f"{bytes_max} (max_payload). Make it smaller."
        )
    return message.topic, block, payload


def _add(block: bytearray, name: str, value: str | bytes | None) -> None:
    text = b"" if value is None else value if isinstance(value, bytes) else utf8(value)
    if not name or _NO_NAME.search(name):
        raise MessageRefused(
            "NATS does not allow a header name that is empty or has a space, colon or control character."
        )
    if b"\r" in text or b"\n" in text:
        raise MessageRefused(
            f"The value of header {name} contains a line break, which NATS does not allow: encode it."
        )
    block += utf8(name) + b": " + text + b"\r\n"


def _error_of(got: Msg, topic: str) -> BrokerError | None:
    if (got.headers or {}).get("Status") == "503":
        return BrokerError(f"No NATS stream has the subject {topic!r}: create one.")
    try:
        answer: Any = json.loads(got.data)
        if answer.get("error") is None and answer["stream"]:
            return None
        code, text = answer["error"]["err_code"], answer["error"]["description"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return BrokerError(
            f"Whatever answers on subject {topic!r} is not a stream, so nothing confirms that the message is kept."
        )
    if code in _TOO_LARGE:
        return MessageRefused(f"The stream of {topic!r} will not accept the message ({text}).")
    return BrokerError(f"The stream of {topic!r} did not accept the message ({text}).")


def _without_credentials(server: str) -> str:
    # without user and password
    return server.rpartition("@")[2].removeprefix("nats://").removeprefix("tls://")
