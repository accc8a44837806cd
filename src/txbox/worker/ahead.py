"""The batch that comes next: its claim is sent behind the COMMIT of the one before it.

While the server commits one batch and claims the next, the lane settles and prepares: neither waits
for the other's turn, and two round trips of each batch become one. What is begun ahead is the next
transaction, not a second one: it is begun when the one before it has ended, on the same connection.

Source: docs/decisions/0026-claims-ahead.md
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from txbox.errors import StoreError
from txbox.intake import Leasing
from txbox.steps import Begin, Commit, Raised, Step, Steps
from txbox.worker.work import Work

T = TypeVar("T")


class Ahead:
    """A batch with its steps, of which the first has been taken: nothing of it has been sent yet.

    Attributes:
        leasing: what is leased with the batch, where that is stored.
    """

    __slots__ = ("batch", "first", "leasing", "steps")

    def __init__(
        self, batch: list[Work], steps: Steps[Any], leasing: Leasing | None = None
    ) -> None:
        self.batch = batch
        self.steps = steps
        self.leasing = leasing
        self.first: Step = next(steps)

    @property
    def begin(self) -> Begin | None:
        """What may go out ahead; None when something else comes first."""
        return self.first if type(self.first) is Begin else None


def carried_on(
    steps: Steps[T], step: Step, following: Callable[[], Begin | None] | None = None
) -> Steps[T]:
    """Go on with steps from one that has been taken.

    Args:
        following: what a COMMIT of a batch is sent with, see `Commit`.
    """
    try:
        while True:
            if following is not None and type(step) is Commit and step.statements:
                step = Commit(step.statements, following)
            try:
                outcome = yield step
            except (StoreError, Raised) as error:
                step = steps.throw(error)
            else:
                step = steps.send(outcome)
    except StopIteration as stop:
        answer: T = stop.value
        return answer
    finally:
        steps.close()
