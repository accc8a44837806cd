"""What a forked child process must not take over from threads of its parent, which it does not have."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Inherited(Protocol):
    """Holds locks, connections or the work of threads."""

    def forget_parent(self) -> None:
        """Begin anew; called in a child, before anything else runs there."""
        ...


_inherited: WeakSet[Inherited] = WeakSet()


def forgets_parent(inherited: Inherited) -> None:
    """Have an object begin anew in each process that is forked while it lives."""
    _inherited.add(inherited)


def _forked() -> None:
    for inherited in list(_inherited):
        inherited.forget_parent()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_forked)
