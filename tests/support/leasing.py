"""Rows that a test has stored and leased, as a lane does before it runs them."""

from __future__ import annotations

from collections.abc import Iterable

from txbox.outcome import Answer
from txbox.processing.intake import LeasedAnswer


class Leasing:
    """The rows of what was taken with `Mode.LEASED`, and the token of their leases."""

    def __init__(self, answers: Iterable[Answer]) -> None:
        leased = [answer for answer in answers if isinstance(answer, LeasedAnswer)]
        self.rows = [answer.leased for answer in leased]
        (self.token,) = {answer.token for answer in leased} or {""}
