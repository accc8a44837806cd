"""The page."""

from __future__ import annotations

from tests.brokers.crashes.results import Results


def about() -> dict[str, str]:
    return {}


def write(results: Results) -> None:
    list(results)
