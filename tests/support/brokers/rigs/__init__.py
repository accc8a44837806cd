"""The rigs of the real brokers, for the suites of `txbox.testing.brokers`: one file a broker.

To add a broker: write its rig, and a test class of about ten lines, as in `tests/brokers/test_redis.py`.
"""

from __future__ import annotations

from typing import Any

from tests.support.warm import Warm
from txbox.testing.brokers import Rig


class ServerRig(Rig):
    """Its processes start in a sixth of the time."""

    def python(self, *words: str, **options: Any) -> Warm:
        return Warm(words, **options)
