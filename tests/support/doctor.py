"""What the doctor says of a database or an App, without what the servers of the tests are set to on purpose."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from txbox.admin import Admin
from txbox.admin.doctor import Diagnosis, Finding

#: The servers that tests share wait for no disk.
NOT_DURABLE = frozenset({"durability-fsync", "durability-torn-pages", "durability-flush"})


def diagnosed(target: Any, *, grace: timedelta | None = None) -> Diagnosis:
    """What the doctor finds; each finding must say what mends it."""
    with Admin(target) as admin:
        diagnosis = admin.doctor(grace=grace)
    for finding in diagnosis.findings:
        assert finding.problem.endswith("."), finding
        assert finding.remedy.endswith("."), finding
    return diagnosis


def findings(target: Any, *, grace: timedelta | None = None) -> dict[str, Finding]:
    """The findings by their codes, without those of a server that waits for no disk."""
    return {
        finding.code: finding
        for finding in diagnosed(target, grace=grace).findings
        if finding.code not in NOT_DURABLE
    }
