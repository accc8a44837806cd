"""One entry of a Redis stream: from its fields to a message."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from txbox.brokers.base import Delivery
from txbox.brokers.plain import plain_time
from txbox.message import Headers, Message

#: An entry id and its fields; None for one that was trimmed or deleted.
Entry = tuple[bytes, list[tuple[bytes, bytes]] | None]

# an id from before 2001 was made up by the producer: the server's own ids begin with its clock
_CLOCK_MS_MIN = 10**12


def entries_of(reply: Any) -> Iterator[tuple[str, list[Entry]]]:
    """Read the answer to XREADGROUP: each stream with its entries."""
    for stream, entries in reply or ():
        yield stream.decode(), [entry_of(entry) for entry in entries]


def entry_of(reply: Any) -> Entry:
    entry_id, flat = reply
    return entry_id, list(zip(flat[::2], flat[1::2], strict=True)) if flat else None


def delivery_of(
    fields: list[tuple[bytes, bytes]],
    tag: tuple[str, bytes],
    payload_field: bytes,
    weak_scope: str,
    *,
    redelivered: bool,
) -> Delivery:
    """Make an entry a message, or say why it is none.

    Args:
        tag: stream and entry id.
        weak_scope: what the weak id begins with.
    """
    stream, entry_id = tag
    names = [name for name, _ in fields]
    content_type = None
    if payload_field in names:
        at = names.index(payload_field)
        payload = fields[at][1]
        headers = _headers(fields[:at] + fields[at + 1 :])
    else:
        headers = _headers(fields)
        content_type = "application/json"
        try:
            texts = {name.decode(): value.decode() for name, value in fields}
        except UnicodeDecodeError:
            texts = {}
        if len(texts) != len(fields):
            return Delivery(
                None, stream, tag, redelivered=redelivered,
                raw=b"\n".join(name + b"=" + value for name, value in fields),
                problem=f"Entry {entry_id.decode()} has no field {payload_field.decode()!r}, and its fields are "
                "no JSON object: one is repeated or not UTF-8. Set payload= of RedisStreams.",
            )  # fmt: skip
        payload = json.dumps(texts, ensure_ascii=False).encode()
    message: Message[Any] = Message(
        topic=stream,
        payload=payload,
        type=headers.text("type") or headers.text("ce_type"),
        key=_key(headers),
        headers=headers,
        content_type=headers.text("content-type")
        or headers.text("ce_datacontenttype")
        or content_type,
        time=plain_time(headers) or _time(headers.text("ce_time"), entry_id),
        origin=_origin(stream, entry_id, weak_scope),
    )
    return Delivery(message, stream, tag, redelivered=redelivered)


def _origin(stream: str, entry_id: bytes, weak_scope: str) -> dict[str, Any]:
    id_text = entry_id.decode()
    origin: dict[str, Any] = {"stream": stream, "entry_id": id_text}
    if _clock_ms(entry_id) >= _CLOCK_MS_MIN:
        origin["weak_id"] = f"{weak_scope}:{stream}:{id_text}"
    return origin


def _headers(fields: Iterable[tuple[bytes, bytes]]) -> Headers:
    return Headers((name.decode(errors="backslashreplace"), value) for name, value in fields)


def _key(headers: Headers) -> str | None:
    key = headers.get("key", headers.get("ce_subject"))
    if not isinstance(key, bytes):
        return key
    try:
        return key.decode()
    except UnicodeDecodeError:
        return f"hex:{key.hex()}"


def _clock_ms(entry_id: bytes) -> int:
    return int(entry_id.partition(b"-")[0])


def _time(text: str | None, entry_id: bytes) -> datetime | None:
    try:
        if text is None:
            clock_ms = _clock_ms(entry_id)
            return (
                datetime.fromtimestamp(clock_ms / 1000, UTC) if clock_ms >= _CLOCK_MS_MIN else None
            )
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
