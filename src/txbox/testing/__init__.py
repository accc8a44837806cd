"""For testing handlers: deliver, race, drain, crash at named points; in their own transactions or inside the test's."""

from txbox.session import Crashed
from txbox.testing.clock import Clock, frozen_clock
from txbox.testing.crash import (
    crash_at,
    install_from_environment,
    kill_at,
    meanwhile,
)
from txbox.testing.deliveries import (
    crash_points,
    deliver,
    deliver_async,
    drain,
    drain_async,
    race,
    race_async,
)
from txbox.testing.inside import another_process, inside

__all__ = [
    "Clock",
    "Crashed",
    "another_process",
    "crash_at",
    "crash_points",
    "deliver",
    "deliver_async",
    "drain",
    "drain_async",
    "frozen_clock",
    "inside",
    "install_from_environment",
    "kill_at",
    "meanwhile",
    "race",
    "race_async",
]
