"""Publishing to NATS JetStream: pipelined messages, and the stream's acknowledgement of each."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

import nats.errors
from nats.aio.msg import Msg
from nats.protocol import command as _command

from txbox.brokers.nats.link import Client, Loop, connected
from txbox.brokers.plain import CONTENT_TYPE, KEY, TIME, TYPE, described, payload_of, utf8
from txbox.errors import BrokerError, BrokerUnavailable, MessageRefused
from txbox.message import Message

_hpub: Any = cast("Any", _command).hpub_cmd  # untyped there
_ID = "Nats-Msg-Id"
#: With such a header a message would expire, replace others or depend on a sequence.
_STEERING = "nats-"
#: More unconfirmed at a time would only wait in the server, which refuses what is beyond its bound.
_WINDOW = 1000
_LAST_WORD_S = 0.5
_CLOSE_S = 5.0
#: One line of the protocol holds the subject, and the server ends a connection whose line is too long.
_SUBJECT_BYTES_MAX = 1024
_NO_NAME = re.compile(r"[\x00-\x20:\x7f]")
_NO_SUBJECT = re.compile(r"[\x00-\x20\x7f*>]|^\.|\.$|\.\.|^$")
#: err_code of a message that is larger than its stream allows.
_TOO_LARGE = frozenset({10054})
_PASSING = (nats.errors.Error, OSError, asyncio.TimeoutError)


class NatsPublisher:
    """Publishes to the streams that have the topics among their subjects, and awaits each PubAck.

    The id is `Nats-Msg-Id`: what a stream has of the last minutes (its duplicate window) it takes as
    confirmed and does not keep twice. Type, key, content type and time are headers `type`, `key`,
    `content-type` and `time`. Header values lose white space at both ends, one that is None
    arrives as empty text; a line break in one is refused. Other headers that begin with `Nats-` steer
    the server and are left out. There are no tombstones.

    Guarantee: what is confirmed is in the stream, as durable as the stream is: file storage, and
    `sync_interval: always` or several replicas where a power failure must not lose it.
    """

    event_prefix = "ce-"

    def __init__(self, servers: Sequence[str], options: Mapping[str, Any]) -> None:
        self._servers, self._options = list(servers), options
        self.name = "nats:" + ",".join(_shown(server) for server in self._servers)
        self._loop: Loop | None = None
        self._client: _Publishing | None = None

    def publish(
        self, messages: Sequence[Message[Any]], within_s: float
    ) -> Sequence[BrokerError | None]:
        if self._loop is None:
            self._loop = Loop(f"txbox-{self.name}")
        loop = self._loop
        batch = _Batch(messages, within_s)
        try:
            loop.call(self._publish(batch, time.monotonic() + within_s), within_s + _LAST_WORD_S)
        except (*_PASSING, BrokerUnavailable) as error:
            self._drop(loop)
            if not batch.heard:
                said = str(error) or type(error).__name__
                raise BrokerUnavailable(f"NATS cannot be used now: {said}") from error
        return batch.answers

    def close(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                self._drop(loop)
            finally:
                loop.close()

    # -- on the loop --------------------------------------------------------------------------

    async def _publish(self, batch: _Batch, until: float) -> None:
        last_word_s = min(_LAST_WORD_S, (until - time.monotonic()) / 4)
        client = self._client
        if client is None or not client.is_connected:
            self._client = None
            async with asyncio.timeout(until - last_word_s - time.monotonic()):
                client = self._client = await connected(self._servers, self._options, _Publishing)
                await client.listen()
        client.batch = batch
        try:
            async with asyncio.timeout(until - last_word_s - time.monotonic()):
                await client.send_all(batch)
        except TimeoutError:
            # the connection's buffer may hold some still: they must not leave later
            self._client = None
            try:
                if not batch.heard:
                    await cast("Any", client).flush(last_word_s)
            finally:
                client.cut()
        finally:
            client.batch = None

    def _drop(self, loop: Loop) -> None:
        client, self._client = self._client, None
        if client is not None:
            try:
                loop.call(client.close(), _CLOSE_S)
            except (*_PASSING, BrokerUnavailable):
                client.cut()


class _Batch:
    """The messages of one call and what has been heard of them."""

    def __init__(self, messages: Sequence[Message[Any]], within_s: float) -> None:
        self.messages = messages
        self.answers: list[BrokerError | None] = [
            BrokerError(f"The stream has not confirmed the message for {message.topic!r} within {within_s:g} s.")
            for message in messages
        ]  # fmt: skip
        self.waiting: set[int] = set()
        self.heard = False
        self.changed = asyncio.Event()


class _Publishing(Client):
    """The client, with headers as they are and acknowledgements by the number of the message."""

    batch: _Batch | None = None
    _inbox = ""
    _round = 0

    async def listen(self) -> None:
        self._inbox = self.new_inbox()
        client: Any = self  # partly typed there
        await client.subscribe(
            f"{self._inbox}.*", cb=self._acknowledged, pending_msgs_limit=-1, pending_bytes_limit=-1
        )

    async def send_all(self, batch: _Batch) -> None:
        self._round += 1
        for at, message in enumerate(batch.messages):
            try:
                subject, block, payload = _frame(message, self.max_payload)
            except MessageRefused as refusal:
                batch.answers[at] = refusal
                continue
            while len(batch.waiting) >= _WINDOW:
                await self._flushed(batch)
            batch.waiting.add(at)
            # the client's own publish takes no repeated header and no bytes
            await self._send_command(
                _hpub(subject, f"{self._inbox}.{self._round}-{at}", block, payload)
            )
        while batch.waiting:
            await self._flushed(batch)

    async def _flushed(self, batch: _Batch) -> None:
        batch.changed.clear()
        await self._flush_pending()
        if not self.is_connected:
            raise nats.errors.ConnectionClosedError
        try:
            await asyncio.wait_for(batch.changed.wait(), _LAST_WORD_S)
        except TimeoutError:
            # looks at the connection again
            return

    async def _acknowledged(self, got: Msg) -> None:
        batch = self.batch
        turn, _, at = got.subject.rpartition(".")[2].partition("-")
        if batch is None or int(turn) != self._round:
            # of an earlier call, which has given up on it
            return
        topic = batch.messages[int(at)].topic
        batch.heard = True
        batch.waiting.discard(int(at))
        batch.answers[int(at)] = _sentence(got, topic)
        batch.changed.set()

    def cut(self) -> None:
        """End the connection without sending what still waits in it."""
        self._pending.clear()
        transport: Any = self._transport
        if transport is not None:
            transport.close()


def _frame(message: Message[Any], bytes_max: int) -> tuple[str, bytearray, bytes]:
    topic = utf8(message.topic)
    if _NO_SUBJECT.search(message.topic) or len(topic) > _SUBJECT_BYTES_MAX:
        raise MessageRefused(
            f"{message.topic!r} is no subject to publish to: no spaces, wildcards or empty tokens, "
            f"and at most {_SUBJECT_BYTES_MAX} bytes."
        )
    payload = payload_of(message, "NATS")
    block = bytearray(b"NATS/1.0\r\n")
    if message.id is not None:
        _add(block, _ID, str(message.id))
    for name, value in described(message, TYPE, KEY, CONTENT_TYPE, TIME):
        if not name.lower().startswith(_STEERING) or (
            name.lower() == _ID.lower() and not message.id
        ):
            _add(block, name, value)
    block += b"\r\n"
    if len(block) + len(payload) > bytes_max:
        raise MessageRefused(
            f"The message has {len(block) + len(payload)} bytes with its headers: NATS takes "
            f"{bytes_max} (max_payload). Make it smaller."
        )
    return message.topic, block, payload


def _add(block: bytearray, name: str, value: str | bytes | None) -> None:
    text = b"" if value is None else value if isinstance(value, bytes) else utf8(value)
    if not name or _NO_NAME.search(name):
        raise MessageRefused(
            "NATS takes no header whose name is empty or has a space, colon or control character."
        )
    if b"\r" in text or b"\n" in text:
        raise MessageRefused(
            f"The header {name} has a line break, which would end it on NATS: encode its value."
        )
    block += utf8(name) + b": " + text + b"\r\n"


def _sentence(got: Msg, topic: str) -> BrokerError | None:
    if (got.headers or {}).get("Status") == "503":
        return BrokerError(f"No stream of NATS has the subject {topic!r}: create one.")
    try:
        answer: Any = json.loads(got.data)
        if answer.get("error") is None and answer["stream"]:
            return None
        code, text = answer["error"]["err_code"], answer["error"]["description"]
    except (ValueError, KeyError, TypeError, AttributeError):
        return BrokerError(
            f"What answers on subject {topic!r} is no stream: nothing says that the message is kept."
        )
    if code in _TOO_LARGE:
        return MessageRefused(f"The stream of {topic!r} takes no such message ({text}).")
    return BrokerError(f"The stream of {topic!r} did not take the message ({text}).")


def _shown(server: str) -> str:
    # without user and password
    return server.rpartition("@")[2].removeprefix("nats://").removeprefix("tls://")
