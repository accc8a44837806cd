"""What a program sends as JSON, and reads back by its annotation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, cast
from uuid import UUID

import msgspec
import pydantic
import pytest

from tests.support.databases import Raw
from txbox import App, ConfigurationError, Message, Outgoing
from txbox.handlers.body import as_json, decoder_for
from txbox.session import drive

MOMENT = datetime(2026, 11, 23, 12, 30, tzinfo=UTC)
NUMBER = UUID("018f0000-0000-7000-8000-000000000001")


class Colour(Enum):
    RED = "red"


@dataclass
class Line:
    price: Decimal
    colour: Colour


@dataclass
class Order:
    id: UUID
    at: datetime
    day: date
    lines: list[Line]


class Model(pydantic.BaseModel):
    id: UUID
    at: datetime
    price: Decimal


class Struct(msgspec.Struct):
    id: UUID
    at: datetime
    price: Decimal


@dataclass
class Id:
    id: UUID


class IdModel(pydantic.BaseModel):
    id: UUID


class IdStruct(msgspec.Struct):
    id: UUID


ORDER = Order(NUMBER, MOMENT, MOMENT.date(), [Line(Decimal("9.90"), Colour.RED)])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (MOMENT, "2026-11-23T12:30:00+00:00"), (MOMENT.date(), "2026-11-23"), (time(1, 2), "01:02:00"),
        (timedelta(minutes=1.5), 90.0), (NUMBER, str(NUMBER)), (Decimal("9.90"), "9.90"),
        (Colour.RED, "red"), ({1}, [1]), (frozenset("a"), ["a"]), ((1, 2), [1, 2]),
        (
            ORDER,
            {
                "id": str(NUMBER), "at": MOMENT.isoformat(), "day": "2026-11-23",
                "lines": [{"price": "9.90", "colour": "red"}],
            },
        ),
        (
            {"model": Model(id=NUMBER, at=MOMENT, price=Decimal("9.90"))},
            {"model": {"id": str(NUMBER), "at": "2026-11-23T12:30:00Z", "price": "9.90"}},
        ),
        (
            [Struct(NUMBER, MOMENT, Decimal("9.90"))],
            [{"id": str(NUMBER), "at": "2026-11-23T12:30:00Z", "price": "9.90"}],
        ),
    ],
)  # fmt: skip
def test_values_become_json(value: object, expected: object) -> None:
    assert json.loads(as_json(value)) == expected


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (object(), "This builtins.object cannot be written as JSON"), (b"x", "This builtins.bytes cannot"),
        ({"a": [1, {"b": open}]}, "cannot be written as JSON"), (float("nan"), "Out of range float"),
        ({NUMBER: 1}, "keys must be str"), (Order, "This builtins.type cannot be written"),
    ],
)  # fmt: skip
def test_what_is_no_json_is_refused_in_one_sentence(value: object, says: str) -> None:
    with pytest.raises((TypeError, ValueError)) as refused:
        as_json(value)
    assert says in str(refused.value)


def test_dataclass_reads_what_it_was_written_as(monkeypatch: pytest.MonkeyPatch) -> None:
    # where pydantic is imported it decodes dataclasses
    monkeypatch.setattr("txbox.handlers.body._pydantic", lambda annotation: None)
    message: Message[Any] = Message(topic="orders", payload=as_json(ORDER))
    assert decoder_for(Order)(message) == ORDER


@pytest.fixture
def raw(sqlite_url: str) -> Iterator[Raw]:
    with Raw(sqlite_url) as raw:
        yield raw


def test_staged_values_just_work(sqlite_url: str, raw: Raw) -> None:
    with App(sqlite_url) as app:
        seen: list[Any] = []

        @app.handler("orders", consumer="billing")
        def bill(message: Message[Order], tx: Any) -> None:
            seen.append(message.body)
            app.outbox.stage(tx, "copies", message.body)
            app.outbox.stage(tx, "copies", Model(id=NUMBER, at=MOMENT, price=Decimal(1)))
            app.outbox.stage(tx, "copies", {"at": MOMENT, "id": NUMBER, "price": Decimal("1.0")})

        @app.handler("copies", consumer="copies")
        def copy(message: Message[Any], tx: Any) -> None: ...

        assert app.process(Message(topic="orders", id="1", payload=as_json(ORDER))) == "processed"
    assert seen == [ORDER]
    bodies = [json.loads(row[0]) for row in raw.rows("SELECT payload FROM txbox_outbox")]
    assert [body["at"][:19] for body in bodies] == ["2026-11-23T12:30:00"] * 3


def test_delay_takes_a_timedelta(sqlite_url: str) -> None:
    with App(sqlite_url) as app:
        assert app.database.sync is not None
        late = [Outgoing(topic="t", body=1, delay=cast("Any", 5))]
        with pytest.raises(ConfigurationError, match="delay is 5: give a time"):
            drive(app.database.sync, app.outbox.staging, app.store.dialect, late)


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Any, {"id": str(NUMBER)}), (dict, {"id": str(NUMBER)}), (Id, Id(NUMBER)), (IdStruct, IdStruct(NUMBER)),
        (IdModel, IdModel(id=NUMBER)), (bytes, b'\xef\xbb\xbf{"id": "%b"}' % str(NUMBER).encode()),
    ],
)  # fmt: skip
def test_json_behind_a_byte_order_mark_is_read(annotation: Any, expected: object) -> None:
    payload = b'\xef\xbb\xbf{"id": "%b"}' % str(NUMBER).encode()
    assert decoder_for(annotation)(Message(topic="orders", payload=payload)) == expected
