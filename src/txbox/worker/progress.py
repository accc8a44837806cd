"""A source's progress, kept in rows of txbox_job."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from txbox.app import App
from txbox.brokers.base import Anchor
from txbox.identity import canonical_id
from txbox.store import jobs
from txbox.store.jobs import JobLease
from txbox.worker.driving import Driver

# short: whoever takes over waits this long; too short only costs reading again
_LEASE_S = 3.0


class StoredProgress:
    """The lease and the state of one source, and the anchors of its partitions."""

    def __init__(self, app: App, driver: Driver, name: str) -> None:
        self._driver = driver
        self._lease = JobLease(app.store.dialect, name, secrets.token_hex(16), _LEASE_S)
        self.anchors = StoredAnchors(app, driver)

    @property
    def lease_s(self) -> float:
        return self._lease.lease_s

    def acquire(self) -> bool:
        return self._driver.perform(self._lease.acquire)

    def load(self) -> str | None:
        return self._driver.perform(self._lease.load)

    def save(self, state: str) -> bool:
        return self._driver.perform(self._lease.save, state)

    def release(self) -> None:
        self._driver.perform(self._lease.release)


class StoredAnchors:
    """Positions that any process may advance; no lease, for each is a fact."""

    def __init__(self, app: App, driver: Driver) -> None:
        self._dialect = app.store.dialect
        self._driver = driver

    def read(self, names: Sequence[str]) -> Mapping[str, Anchor]:
        stored = [_stored_name(name) for name in names]
        history, positions = self._driver.perform(jobs.anchors, self._dialect, stored)
        return {name: Anchor(positions.get(_stored_name(name)), history) for name in names}

    def advance(self, moves: Mapping[str, tuple[int, Anchor]]) -> Mapping[str, Anchor]:
        wanted = {_stored_name(name): move for name, move in moves.items()}

        def allowed(history: str, positions: Mapping[str, int]) -> Mapping[str, int]:
            return {
                name: position
                for name, (position, known) in wanted.items()
                if not known.is_missing_in(Anchor(positions.get(name), history))
            }

        history, before = self._driver.perform(jobs.anchors, self._dialect, list(wanted), allowed)
        after = dict(before)
        for name, position in allowed(history, before).items():
            after[name] = max(position, before.get(name, position))
        return {name: Anchor(after.get(_stored_name(name)), history) for name in moves}


def _stored_name(name: str) -> str:
    return canonical_id(f"anchor:{name}")
