"""A source's progress, kept in a row of txbox_job."""

from __future__ import annotations

import secrets

from txbox.app import App
from txbox.store.jobs import JobLease
from txbox.worker.driving import Driver

# short: whoever takes over waits this long; too short only costs reading again
_LEASE_S = 3.0


class StoredProgress:
    """The lease and the state of one source."""

    def __init__(self, app: App, driver: Driver, name: str) -> None:
        self._driver = driver
        self._lease = JobLease(app.store.dialect, name, secrets.token_hex(16), _LEASE_S)

    @property
    def lease_s(self) -> float:
        return self._lease.lease_s

    def acquire(self) -> bool:
        return self._driver.perform(self._lease.acquire())

    def load(self) -> str | None:
        return self._driver.perform(self._lease.load())

    def save(self, state: str) -> bool:
        return self._driver.perform(self._lease.save(state))

    def release(self) -> None:
        self._driver.perform(self._lease.release())
