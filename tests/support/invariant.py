"""A broken invariant of txbox's own: what ends a worker, whatever else is contained."""

from __future__ import annotations

import txbox

_BROKEN = compile("assert False, 'an invariant of ours is broken'", txbox.__file__, "exec")


def broken_invariant() -> None:
    """Raise AssertionError as a line of txbox would."""
    exec(_BROKEN)  # noqa: S102  # its frame names a file of txbox
