"""How two payloads are compared, and how one is shown: what is there, in bounded time and size."""

from __future__ import annotations

import json
import random
import time

import pytest

from txbox.ui.render import differences, readable


@pytest.mark.parametrize(
    ("stored", "aside"),
    [
        ('{"a": 1.10}', '{"a": 1.1}'),
        ('{"a": 1, "a": 2}', '{"a": 2}'),
        ("[12345678901234567890123]", "[12345678901234567890124]"),
        ("[1e2]", "[100.0]"),
        ('["\\u00e9"]', '["é"]'),
        ('{"a": 1}', '{"a":1}'),
        ("a\r\nb", "a\nb"),
        ("a\n", "a"),
        ("x" * 300_000 + "y", "x" * 300_000 + "z"),
        ("x\n" * 2_000 + "y", "x\n" * 2_000 + "z"),
        ("", "\n"),
    ],
)
def test_payloads_that_differ_are_not_called_the_same(stored: str, aside: str) -> None:
    for one, other in ((stored, aside), (aside, stored)):
        assert {kind for kind, _, _ in differences(one.encode(), other.encode())} != {"same"}
        assert {kind for kind, _, _ in differences(one.encode(), one.encode())} <= {"same", "cut"}


def test_lines_in_common_stand_side_by_side() -> None:
    assert differences(b'{"a": 1, "b": [2], "c": {}}', b'{"a": 1, "b": [3, 2], "d": {}}') == [
        ("same", "{", "{"),
        ("same", '  "a": 1,', '  "a": 1,'),
        ("same", '  "b": [', '  "b": ['),
        ("only aside", "", "    3,"),
        ("same", "    2", "    2"),
        ("same", "  ],", "  ],"),
        ("changed", '  "c": {}', '  "d": {}'),
        ("same", "}", "}"),
    ]
    assert differences(None, b"x") == [("only aside", "", "x")]
    assert differences(b"\xff", b"x")[0][0] == "changed"


def test_every_line_is_there_once_and_in_order() -> None:
    pick = random.Random(7)
    for _ in range(500):
        one, other = ([pick.choice("abc") for _ in range(pick.randint(1, 9))] for _ in "12")
        lines = differences("\n".join(one).encode(), "\n".join(other).encode())
        assert [left for kind, left, _ in lines if kind != "only aside"] == one
        assert [right for kind, _, right in lines if kind != "only stored"] == other
        assert all((left == right) == (kind == "same") for kind, left, right in lines)


_HOSTILE = {
    "lists of one number": ("[" + "1," * 2_500 + "1]", "[" + "2," * 2_500 + "1]"),
    "two lines that alternate": ("a\nb\n" * 500, "b\na\n" * 500),
    "two lines at random": tuple(
        "\n".join(random.Random(seed).choice("ab") for _ in range(1_000)) for seed in (1, 2)
    ),
    "nothing in common": ("a\n" * 1_000, "b\n" * 1_000),
    "empty lines": ("\n" * 250_000, "\nb" * 125_000),
    "one line": ("x" * 1_000_000, "x" * 1_000_000 + "y"),
    "deep": ("[" * 900 + "1," * 50_000 + "1" + "]" * 900, "[" * 800 + "1" + "]" * 800),
    "too deep": ("[" * 100_000, "{" * 100_000),
    "digits": ("9" * 250_000, "8" * 250_000),
    "quotes": ('"\\' * 100_000, '\\"' * 100_000),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_comparing_and_showing_are_bounded(name: str) -> None:
    stored, aside = (text.encode() for text in _HOSTILE[name])
    started = time.process_time()
    lines = differences(stored, aside)
    shown = readable(stored)
    assert time.process_time() - started < 1.5
    assert sum(len(left) + len(right) for _, left, right in lines) < 2_500_000
    assert shown is not None
    assert len(shown.text) <= 512 * 1024


@pytest.mark.parametrize(
    "value",
    [{"a": [1, {"b": [], "c": {}}], "d": 'x"[\\', "é": None}, [], {}, "x", -1.5e300, [[[1]]]],
)
def test_json_is_indented_and_nothing_else(value: object) -> None:
    text = json.dumps(value)
    shown = readable(text.encode())
    assert shown == ("JSON", json.dumps(value, indent=2), False)
    again = readable(json.dumps(value, indent=7).encode())
    assert again == shown
    for number in ("1.10", "9" * 5_000, "1E+2", "-0"):
        assert readable(f"[{number}]".encode()) == ("JSON", f"[\n  {number}\n]", False)
