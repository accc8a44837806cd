"""The AsyncAPI document of an app: complete, without dangling references, and without addresses."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from faststream.specification.asyncapi.v3_0_0.schema import ApplicationSchema
from jsonschema import Draft202012Validator

from tests.support.command import Command
from txbox import App, Message
from txbox.brokers.rabbitmq import RabbitMQ
from txbox.cli import main
from txbox.cli.asyncapi import document


@dataclass
class Item:
    name: str


@dataclass
class Order:
    number: int
    items: list[Item]


class Refund(msgspec.Struct):
    order: int


@pytest.fixture
def app() -> App:
    made = App("sqlite:///nowhere.db")

    @made.handler(
        "orders", types=["order.paid", "order.sent"], consumer="billing", reply_to="invoices"
    )
    def bill(message: Message[Order], tx: sqlite3.Connection) -> dict[str, int]:
        """Write an invoice."""
        return {}

    @made.handler("orders", consumer="audit", dead_letter_topic="lost orders")
    def audit(message: Message[bytes], tx: sqlite3.Connection) -> None: ...

    @made.handler("refunds/eu", consumer="billing", batch=True)
    def refund(messages: list[Message[Refund]], tx: sqlite3.Connection) -> None: ...

    @made.handler("refunds eu", consumer="billing")
    def other(message: Message[dict[str, int]], tx: sqlite3.Connection) -> None: ...

    made.publish(RabbitMQ("amqp://user:s3cret@nowhere/"), ["invoices", "lost orders", "mails"])
    return made


@pytest.fixture
def described(app: App) -> dict[str, Any]:
    # what comes back is what a file would have
    made: dict[str, Any] = json.loads(json.dumps(document(app, title="Shop", version="1.4")))
    return made


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def found(described: dict[str, Any], reference: str) -> Any:
    place: Any = described
    for step in reference.removeprefix("#/").split("/"):
        place = place[step]
    return place


def test_it_has_the_shape_of_the_specification(described: dict[str, Any]) -> None:
    ApplicationSchema.model_validate(described)
    assert described["asyncapi"] == "3.0.0"
    assert described["info"] == {"title": "Shop", "version": "1.4"}


def test_it_connects_to_nothing(sqlite_shop: Command) -> None:
    url = "sqlite:///there/is/no/such/file.db"
    described = sqlite_shop("asyncapi", "--json", env={"SHOP_URL": url}).json
    assert described["asyncapi"] == "3.0.0"


def test_no_reference_dangles(described: dict[str, Any]) -> None:
    pointed = list(references(described))
    assert len(pointed) > 10
    for reference in pointed:
        assert found(described, reference) is not None


def test_every_handler_receives_and_every_topic_that_leaves_is_sent(
    described: dict[str, Any],
) -> None:
    operations = [
        (each["action"], found(described, each["channel"]["$ref"])["address"], each.get("title"))
        for each in described["operations"].values()
    ]
    assert sorted(operations, key=str) == [
        ("receive", "orders", "audit"),
        ("receive", "orders", "billing"),
        ("receive", "refunds eu", "billing"),
        ("receive", "refunds/eu", "billing"),
        ("send", "invoices", None),
        ("send", "lost orders", None),
        ("send", "mails", None),
    ]
    assert "s3cret" not in json.dumps(described)


def test_bodies_have_the_schema_of_their_annotation(described: dict[str, Any]) -> None:
    (billing,) = (
        each
        for each in described["operations"].values()
        if each.get("description") == "Write an invoice."
    )
    messages = [found(described, each["$ref"]) for each in billing["messages"]]
    assert [each["name"] for each in messages] == ["order.paid", "order.sent"]
    schema = {**messages[0]["payload"], "components": described["components"]}
    validator = Draft202012Validator(schema)
    assert validator.is_valid({"number": 1, "items": [{"name": "pen"}]})
    assert not validator.is_valid({"number": 1, "items": [{"title": "pen"}]})
    assert described["components"]["schemas"]["Refund"]["required"] == ["order"]


def test_bytes_have_no_schema(described: dict[str, Any]) -> None:
    assert described["channels"]["orders"]["messages"]["audit.any"]["payload"] == {}


@pytest.mark.parametrize("field", [object, "Missing"])
def test_what_msgspec_cannot_describe_has_no_schema(field: Any) -> None:
    made = App("sqlite:///nowhere.db")
    body = msgspec.defstruct("Body", [("field", field)])

    def bill(message: Any, tx: Any) -> None: ...

    bill.__annotations__ = {"message": Message[body]}  # type: ignore[valid-type]  # made above
    made.handler("orders", consumer="billing", decode=lambda _: body(1))(bill)
    channels = document(made, title="Shop", version="1")["channels"]
    assert channels["orders"]["messages"]["billing.any"]["payload"] == {}


def test_the_command_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "described_shop.py").write_text(
        "from txbox import App\n"
        f"app = App('sqlite:///{tmp_path / 'shop.db'}')\n"
        "@app.handler('orders', consumer='billing')\n"
        "def bill(message, tx): ...\n"
    )
    App(f"sqlite:///{tmp_path / 'shop.db'}").init()
    monkeypatch.chdir(tmp_path)
    assert main(["asyncapi", "described_shop:app", "--service-version", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["info"] == {"title": "described_shop:app", "version": "2"}
    assert list(printed["channels"]) == ["orders"]
