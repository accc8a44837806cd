"""How lengths of time, counts and the text of strangers are written."""

from __future__ import annotations

from txbox.text import age, counted, lasting, visible, with_article


def test_ages_and_counts_for_people() -> None:
    assert [age(number) for number in (None, 0, 59.9, 61, 3600, 90061)] == [
        "", "0s", "59s", "1m 1s", "1h", "1d 1h",
    ]  # fmt: skip
    assert [counted(1), counted(1234, "row"), counted(2, "process")] == [
        "1 message", "1,234 rows", "2 processes",
    ]  # fmt: skip


def test_lengths_of_which_fractions_matter() -> None:
    assert [lasting(seconds) for seconds in (0, 0.00512, 0.5, 1.25, 60, 99.9, 310.4)] == [
        "0 ms", "5.12 ms", "500 ms", "1.25 s", "60 s", "99.9 s", "5m 10s",
    ]  # fmt: skip


def test_articles_of_types() -> None:
    named = [with_article(name) for name in ("int", "AsyncEngine", "dict", "UUID", "Session")]
    assert named == ["an int", "an AsyncEngine", "a dict", "a UUID", "a Session"]


def test_what_cannot_be_seen_is_written_out() -> None:
    assert visible("a\x1b[31m\u202eb\n") == "a\\x1b[31m\\x202eb\n"
