"""`txbox run`: sources, lanes, retries from the table, maintenance, in one process or several."""

from __future__ import annotations

from txbox.worker.supervisor import supervise as supervise
from txbox.worker.worker import Worker as Worker
