"""Each text of an error on the page of troubleshooting is one that the source raises or records."""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from types import ModuleType

from tests.docs.pages import ROOT, page

PAGE = page("docs/troubleshooting.md")


@cache
def _build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs/build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _source() -> str:
    """Every text of the source, a line each."""
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    return "\n".join(
        " ".join(_build()._text(node).split())
        for file in (ROOT / "src/txbox").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds)
    )


def _shown() -> list[str]:
    section = PAGE.text.partition("## By the text of an error")[2]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_every_text_is_in_the_source() -> None:
    assert len(_shown()) > 35
    assert [text for text in _shown() if text not in _source()] == []


def test_a_text_that_is_not_there_is_seen() -> None:
    assert "The database connection was lost." in _source()
    assert "The database connection was mislaid." not in _source()


def test_the_list_of_all_texts_has_each_class_that_is_raised() -> None:
    texts = _build().error_texts()
    assert {"ConfigurationError", "SchemaError", "StoreError", "UnusableMessage"} <= set(texts)
    # made in one place and raised in another; with a constant
    assert {"HandlerTimeout", "PayloadMismatch"} <= set(texts)
    assert "Kafka does not take …: …." in texts["ConfigurationError"]
    assert "The database connection was lost." in texts["StoreUnavailable"]
    assert sum(map(len, texts.values())) > 300


def test_symptoms_name_events_and_options_that_exist() -> None:
    from txbox import events

    named = set(re.findall(r"`((?:Message|Worker|Source|Relay)[A-Z]\w+)`", PAGE.text))
    assert len(named) > 3
    assert [name for name in named if not hasattr(events, name)] == []
