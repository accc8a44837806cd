"""The reference names everything that is there, and nothing that is not."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta
from types import ModuleType

import pytest

from tests.docs.pages import page
from txbox import App, errors, events, outcome, policy
from txbox.handlers import HandlerOptions

HANDLERS = page("docs/reference/handlers.md")
EVENTS = page("docs/reference/events.md")
ERRORS = page("docs/reference/errors.md")
TABLES = page("docs/reference/tables.md")


def _classes(module: ModuleType, root: type) -> list[type]:
    return [
        own
        for own in vars(module).values()
        if inspect.isclass(own) and own.__module__ == module.__name__ and issubclass(own, root)
    ]


def _policies() -> list[type]:
    return [
        own
        for own in vars(policy).values()
        if dataclasses.is_dataclass(own) and isinstance(own, type)
    ]


def _shown(value: object) -> str:
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
        for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
            if seconds >= size and seconds % size == 0:
                return f"{seconds / size:g} {unit}"
        return f"{seconds:g} s"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    if dataclasses.is_dataclass(value):
        own = ", ".join(
            f"{field.name}={_shown(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        )
        return f"{type(value).__name__}({own})"
    return repr(value).replace("'", '"')


def _rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_every_event_has_a_heading_with_its_fields() -> None:
    wanted = {own.__name__ for own in _classes(events, events.Event)}
    assert wanted <= set(EVENTS.headings())
    for own in _classes(events, events.Event):
        section = EVENTS.text.partition(f"### {own.__name__}\n")[2].partition("\n### ")[0]
        for field in own.__annotations__:
            assert f"`{field}`" in section, f"{own.__name__}.{field} is not described"


def test_events_page_names_no_event_that_is_not_there() -> None:
    named = {
        heading for heading in EVENTS.headings() if re.fullmatch(r"([A-Z][a-z]+){1,3}", heading)
    }
    assert {own for own in named if own != "Events"} <= {
        own.__name__ for own in _classes(events, events.Event)
    }


def test_every_error_has_a_heading() -> None:
    headings = set(ERRORS.headings())
    for own in _classes(errors, Exception):
        assert own.__name__ in headings, f"{own.__name__} has no heading"
    for fault in errors.Fault:
        assert f"`{fault.name}`" in ERRORS.text


@pytest.mark.parametrize("own", _policies(), ids=lambda own: own.__name__)
def test_policy_fields_stand_in_the_table_with_their_defaults(own: type) -> None:
    rows = {row[0]: row[1] for row in _rows(HANDLERS.text) if len(row) >= 2}
    for field in dataclasses.fields(own):
        name = f"`{own.__name__}.{field.name}`"
        assert name in rows, f"{name} is not in the table of policies"
        assert rows[name] == _shown(field.default), f"{name} is {_shown(field.default)}"


def test_handler_options_stand_in_the_table_with_their_defaults() -> None:
    rows = {row[0]: row[1] for row in _rows(HANDLERS.text) if len(row) >= 2}
    defaults = {field.name: field.default for field in dataclasses.fields(HandlerOptions)}
    parameters = set(inspect.signature(App.handler).parameters) - {"self", "topic", "consumer"}
    assert set(defaults) <= parameters
    for name in parameters:
        assert f"`{name}`" in rows, f"the option {name} is not in the table"
        default = defaults.get(name)
        if name in defaults and default is not dataclasses.MISSING:
            wanted = "none" if default in (None, ()) else _shown(default)
            assert rows[f"`{name}`"] == wanted, f"{name} defaults to {wanted}"


def test_app_arguments_are_described() -> None:
    for name in set(inspect.signature(App.__init__).parameters) - {"self"}:
        assert f"`{name}`" in HANDLERS.text, f"App({name}=) is not described"


def test_outcomes_and_statuses_are_described() -> None:
    concepts = page("docs/concepts.md").text
    for own in (*outcome.Outcome, *outcome.Status):
        assert f"`{own.value}`" in concepts or f"`{own.name}`" in concepts, own


def test_every_table_and_column_is_described() -> None:
    from tests.docs.pages import ROOT

    sql = (ROOT / "src/txbox/store/migrations/postgresql/0001_inbox.sql").read_text()
    for table, body in re.findall(r"CREATE TABLE (\w+) \((.*?)\n\);", sql, re.DOTALL):
        assert table in TABLES.headings(), f"{table} has no heading"
        section = TABLES.text.partition(f"## {table}\n")[2].partition("\n## ")[0]
        for column in re.findall(r"^    ([a-z_]+) ", body, re.MULTILINE):
            assert f"`{column}`" in section, f"{table}.{column} is not described"
    for view in re.findall(r"CREATE VIEW (\w+)", sql):
        assert view in TABLES.headings()
