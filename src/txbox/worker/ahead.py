"""The batch that comes next: its claim is sent behind the COMMIT of the one before it.

While the server commits one batch and claims the next, the lane settles and prepares: neither waits
for the other's turn, and two round trips of each batch become one. What is begun ahead is the next
transaction, not a second one: it is begun when the one before it has ended, on the same connection.

Source: docs/decisions/0026-claims-ahead.md
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from txbox.errors import StoreError
from txbox.processing.intake import Leasing
from txbox.steps import Begin, Commit, Raised, Step, Steps
from txbox.worker.work import Work

T = TypeVar("T")


class Prepared:
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


class Following(Protocol):
    """Who knows what comes behind a batch."""

    def begin(self) -> Begin | None:
        """See `Commit.then`."""
        ...

    def put_back(self) -> None:
        """It was not the last COMMIT of its batch: what was prepared behind it holds nothing any more."""
        ...


def carried_on(steps: Steps[T], step: Step, following: Following | None = None) -> Steps[T]:
    """Go on with steps from one that has been taken.

    Nobody knows of a COMMIT whether it is its batch's last: what follows is offered to the first, and to none
    of a batch that goes on. It may wait then, and who waits for an id holds none.
    """
    offered = False
    try:
        while True:
            if following is not None and offered:
                following.put_back()
                following = None
            elif following is not None and type(step) is Commit and step.statements:
                step, offered = Commit(step.statements, following.begin), True
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
