"""The reference names everything that is there, and nothing that is not."""

from __future__ import annotations

import dataclasses
import inspect
import re
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest

from tests.docs.pages import page
from txbox import App, errors, events, outcome, policy
from txbox.admin import doctor, findings
from txbox.admin.doctor import CODES
from txbox.handlers import HandlerOptions, conflicts
from txbox.observers.counters import Counters
from txbox.worker import serving
from txbox.worker.health import Health

HANDLERS = page("docs/reference/handlers.md")
EVENTS = page("docs/reference/events.md")
METRICS = page("docs/reference/metrics.md")
ERRORS = page("docs/reference/errors.md")
TABLES = page("docs/reference/tables.md")
DOCTOR = page("docs/reference/doctor.md")


def _classes(module: ModuleType, root: type) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if inspect.isclass(value)
        and value.__module__ == module.__name__
        and issubclass(value, root)
    ]


def _policies() -> list[type]:
    return [
        value
        for value in vars(policy).values()
        if dataclasses.is_dataclass(value) and isinstance(value, type)
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
        text = ", ".join(
            f"{field.name}={_shown(getattr(value, field.name))}"
            for field in dataclasses.fields(value)
            if getattr(value, field.name) != field.default
        )
        return f"{type(value).__name__}({text})"
    return repr(value).replace("'", '"')


def _rows(text: str) -> list[list[str]]:
    """The cells of every table row."""
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_every_event_has_a_heading_with_its_fields() -> None:
    wanted = {cls.__name__ for cls in _classes(events, events.Event)}
    assert wanted <= set(EVENTS.headings())
    for cls in _classes(events, events.Event):
        section = EVENTS.text.partition(f"### {cls.__name__}\n")[2].partition("\n### ")[0]
        for field in cls.__annotations__:
            assert f"`{field}`" in section, f"{cls.__name__}.{field} is not described"


def test_events_page_names_no_event_that_is_not_there() -> None:
    named = {
        heading for heading in EVENTS.headings() if re.fullmatch(r"([A-Z][a-z]+){1,3}", heading)
    }
    assert {each for each in named if each != "Events"} <= {
        cls.__name__ for cls in _classes(events, events.Event)
    }


def test_every_finding_has_a_heading_and_its_severity() -> None:
    sections = dict(re.findall(r"^### ([a-z-]+)\n(\w+)\.", DOCTOR.text, re.MULTILINE))
    assert {code: found.lower() for code, found in sections.items()} == CODES


def test_every_code_is_used_and_every_used_one_is_known() -> None:
    package = Path(inspect.getfile(doctor)).parent
    used = {
        code
        for file in (*package.glob("*.py"), *map(Path, map(inspect.getfile, (conflicts, findings))))
        if file.name != "__init__.py"
        for code in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', file.read_text())
    }
    assert set(CODES) <= used
    assert used <= set(CODES)


def test_every_metric_is_in_the_tables_with_its_kind_and_no_other() -> None:
    families = [*Counters().collect(), *serving._gauges(Health()), *serving._of_webhooks(())]
    kinds = {
        f"`{family.name}{'_total' if family.type == 'counter' else ''}`": family.type
        for family in families
    }
    rows = [row for row in _rows(METRICS.text) if row[0].startswith("`")]
    # of a parent alone
    shown = {row[0]: re.split(r"[ :]", row[1], maxsplit=1)[0] for row in rows}
    assert shown == kinds | {"`txbox_process_up`": "gauge"}


def test_every_error_has_a_heading() -> None:
    headings = set(ERRORS.headings())
    for cls in _classes(errors, Exception):
        assert cls.__name__ in headings, f"{cls.__name__} has no heading"
    for fault in errors.Fault:
        assert f"`{fault.name}`" in ERRORS.text


@pytest.mark.parametrize("policy_class", _policies(), ids=lambda each: each.__name__)
def test_policy_fields_stand_in_the_table_with_their_defaults(policy_class: type) -> None:
    rows = {row[0]: row[1] for row in _rows(HANDLERS.text) if len(row) >= 2}
    for field in dataclasses.fields(policy_class):
        name = f"`{policy_class.__name__}.{field.name}`"
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
    for each in (*outcome.Outcome, *outcome.Status):
        assert f"`{each.value}`" in concepts or f"`{each.name}`" in concepts, each


def test_every_table_and_column_is_described() -> None:
    from tests.docs.pages import ROOT

    sql = (ROOT / "src/txbox/store/migrations/postgresql/0001_tables.sql").read_text()
    for table, body in re.findall(r"CREATE TABLE (\w+) \((.*?)\n\)", sql, re.DOTALL):
        assert table in TABLES.headings(), f"{table} has no heading"
        section = TABLES.text.partition(f"## {table}\n")[2].partition("\n## ")[0]
        for column in re.findall(r"^    ([a-z_]+) ", body, re.MULTILINE):
            assert f"`{column}`" in section, f"{table}.{column} is not described"
    for view in re.findall(r"CREATE VIEW (\w+)", sql):
        assert view in TABLES.headings()
