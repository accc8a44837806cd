"""The message as a value: made once, never changed, handed over as a copy."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any, cast

import pytest

from txbox import App, Message
from txbox.errors import UnusableMessage
from txbox.handlers import Handler
from txbox.message import Headers, handed_over, parsed
from txbox.policy import Limits


def test_a_message_cannot_be_changed() -> None:
    message: Any = Message[dict[str, Any]](topic="orders", payload="{}", headers={"a": "1"})
    with pytest.raises(AttributeError):
        message.topic = "others"
    with pytest.raises(AttributeError):
        del message.topic
    with pytest.raises(AttributeError):
        message.unknown = 1
    assert (message.topic, message.payload, message.headers) == (
        "orders",
        b"{}",
        Headers({"a": "1"}),
    )


def test_a_message_is_a_value() -> None:
    message: Message[Any] = Message(topic="orders", id=7, origin={"offset": 3})
    assert type(message) is Message
    assert copy.copy(message) == message
    assert pickle.loads(pickle.dumps(message)) == message  # noqa: S301
    changed = dataclasses.replace(message, key="k")
    assert (changed.key, changed.id, message.key) == ("k", 7, None)
    # the size of the payload, not what it says
    assert repr(message) == "Message(topic='orders', id=7, payload=<0 bytes>)"
    assert Message(topic="orders").origin is not Message(topic="orders").origin


class Described(Message[Any]):
    """A subclass with a layout of its own."""

    @property
    def described(self) -> str:
        return f"{self.topic} {self.id}"


def test_a_message_can_be_subclassed() -> None:
    described = Described(topic="orders", id="1", payload="x")
    assert type(described) is Described
    assert (described.described, described.payload, described.attempt) == ("orders 1", b"x", 1)


def test_a_handler_gets_a_message_of_its_own() -> None:
    message: Message[Any] = Message(
        topic="orders", id=7, payload=b"{}", key="k", type="t", attempt=3, sequence=5
    )
    handed = handed_over(message, "7", "billing", {"a": 1})
    assert (handed.id, handed.consumer, handed.body) == ("7", "billing", {"a": 1})
    assert (message.id, message.consumer, message.body) == (7, None, None)
    assert dataclasses.replace(handed, id=7, consumer=None, body=cast("Any", None)) == message


@pytest.fixture
def handler() -> Handler:
    app = App("sqlite:///never-opened.db")
    app.handler("orders", consumer="billing")(_nothing)
    (registered,) = app.handlers
    return registered


def _nothing(message: Message[Any], tx: object) -> None: ...


@pytest.mark.parametrize("character", ["x", "\x01", "é", "\N{GRINNING FACE}"])
def test_headers_are_measured_as_they_are_stored(handler: Handler, character: str) -> None:
    written = {"x": 1, "\x01": 6, "é": 6, "\N{GRINNING FACE}": 12}[character]
    message: Message[Any] = Message(topic="orders", id="1", headers=[("n", character * 100)])
    whole = len('[["n",""]]') + 100 * written
    handler.arrival(message, Limits(headers_bytes=whole))
    with pytest.raises(UnusableMessage, match="headers"):
        handler.arrival(message, Limits(headers_bytes=whole - 1))


def test_an_id_in_the_headers_is_found_in_any_case(handler: Handler) -> None:
    for headers, expected in (
        ({"Message-ID": "7"}, "7"),
        ({"CE_Source": "/shop", "ce_ID": "7"}, "/shop 7"),
        ({"cloudEvents:id": "7", "cloudEvents:source": "/shop"}, "/shop 7"),
        ({"ce_id": "7", "ce-id": "8", "ce-source": "/shop"}, "/shop 8"),
    ):
        message: Message[Any] = Message(topic="orders", headers=headers)
        assert handler.arrival(message, Limits()).message_id == expected


@pytest.mark.parametrize(
    "payload",
    [
        b'{"a": [1, 2.5, null, "\xc3\xa9"]}',
        b' {"a": 1}\n',
        b"7",
        b'\xef\xbb\xbf{"a": 1}',
        '{"a": "é"}'.encode("utf-16"),
        '{"a": "é"}'.encode("utf-32-le"),
        b'"\xed\xa0\x80"',
        b"",
        b"{",
        b'{"a": 1} {"a": 2}',
        b"\xff",
        b"not json",
    ],
)
def test_json_is_parsed_as_the_standard_library_does(payload: bytes) -> None:
    try:
        expected = json.loads(payload)
    except ValueError as error:
        with pytest.raises(type(error)):
            parsed(payload)
    else:
        assert parsed(payload) == expected
