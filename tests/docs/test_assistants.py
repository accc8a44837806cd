"""What assistants are told is the code: every public name, no other, and the options with their names."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re

import txbox
from tests.docs.pages import page
from txbox import events, testing
from txbox.admin import Admin

PAGE = page("docs/assistants.md")
_CODE = re.compile(r"`([^`\n]+)`")
#: Of other libraries, as this page names them.
_OTHERS = {
    "AsyncConnection", "AsyncEngine", "AsyncSession", "Connection", "Engine", "Session",
}  # fmt: skip
_OWNERS = {
    "App": txbox.App,
    "Inbox": txbox.Inbox,
    "Outbox": txbox.Outbox,
    "app": txbox.App("sqlite:///none.db"),
    "inbox": txbox.Inbox,
    "outbox": txbox.Outbox,
    "message": txbox.Message,
    "outcome": txbox.Outcome,
    "event": events.MessageDead,
    "Outcome": txbox.Outcome,
}


def _inline() -> list[str]:
    return _CODE.findall(PAGE.prose)


def test_every_public_name_is_there() -> None:
    words = set(re.findall(r"\w+", " ".join(_inline())))
    assert set(txbox.__all__) - words == set()
    assert set(testing.__all__) - words <= {
        "Crashed", "race_async", "crash_points_async", "crash_everywhere_async", "install_from_environment",
    }  # fmt: skip


def test_every_outcome_and_status_is_there() -> None:
    words = set(_inline())
    assert {each.name for each in txbox.Outcome} <= words
    assert {each.value for each in txbox.Status} <= words


def test_every_option_is_there_and_no_other() -> None:
    # minutes= is of timedelta
    named = {word[:-1] for each in _inline() for word in re.findall(r"\b\w+=", each)}
    of_handler = set(inspect.signature(txbox.App.handler).parameters) - {"self", "topic"}
    of_app = set(inspect.signature(txbox.App).parameters) - {"database"}
    assert of_handler | of_app <= named
    others = {
        name
        for call in (
            txbox.App.effect,
            txbox.Outbox.stage,
            txbox.Message,
            txbox.Retry,
            txbox.Inbox.accept,
            testing.drain,
        )
        for name in inspect.signature(call).parameters
    }
    assert named - of_handler - of_app - others == {"minutes"}


def test_every_name_exists() -> None:
    modules = {"txbox", "sqlite3", "psycopg", "aiosqlite"}
    missing = []
    for each in _inline():
        if each.endswith((".md", ".html", ".txt")) or each.startswith(("txbox ", "sqlite:")):
            continue
        for dotted in re.findall(r"(?<![\"'\w.])([A-Za-z_]+(?:\.[A-Za-z_]+)+)", each):
            head, *rest = dotted.split(".")
            if head in modules:
                if not _resolves(dotted):
                    missing.append(dotted)
            elif head in _OWNERS:
                if not hasattr(_OWNERS[head], rest[0]):
                    missing.append(dotted)
            elif head not in ("time", "shop"):  # time.sleep, shop.db
                missing.append(dotted)
        missing += [
            word
            for word in re.findall(r"(?<![\"'.\w])[A-Z][a-z]+(?:[A-Z]\w+)?\b(?!\.)", each)
            if word not in {*txbox.__all__, Admin.__name__, *_OTHERS}
            and not hasattr(builtins, word)
        ]
    assert missing == []


def _resolves(dotted: str) -> bool:
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:size]))
        except ModuleNotFoundError:
            continue
        for name in parts[size:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def test_the_verbs_of_operators_exist() -> None:
    (verbs,) = re.findall(r"`txbox.admin.Admin` has (.*?);", PAGE.prose, re.DOTALL)
    assert all(hasattr(Admin, verb) for verb in _CODE.findall(verbs))
    (tools,) = re.findall(r"`txbox.testing` has (.*?)\. For", PAGE.prose, re.DOTALL)
    assert set(_CODE.findall(tools)) <= set(testing.__all__)


def test_every_extra_exists() -> None:
    import tomllib

    from tests.docs.pages import ROOT

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"Extras: (.*?`all`)", PAGE.prose, re.DOTALL)
    named = set(_CODE.findall(extras))
    assert len(named) > 15
    assert named - set(project["optional-dependencies"]) == set()


def test_an_unknown_name_is_seen() -> None:
    assert _resolves("txbox.admin.Admin.retry")
    assert not _resolves("txbox.admin.Admin.undo")
    assert not _resolves("txbox.nothing")
