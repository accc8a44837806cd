"""Generated input: random lives of messages beside a model, and text from outside."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

#: So many times the input of a usual run, which takes the same one each time.
LONGER = int(os.environ.get("TXBOX_FUZZ", "1"))


def several(examples: int, steps: int = 50) -> settings:
    """So many examples of a usual run; time is not judged here, since the machine may be busy."""
    return settings(
        max_examples=examples * LONGER,
        stateful_step_count=steps,
        deadline=None,
        derandomize=LONGER == 1,
        database=None,
        suppress_health_check=(
            HealthCheck.too_slow,
            HealthCheck.filter_too_much,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
            HealthCheck.function_scoped_fixture,
        ),
    )
