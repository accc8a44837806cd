"""The job that reviews alerts: what came since, what is over, and what no transaction could tell.

It reads what `txbox doctor` and the overview show of rows and processes; nothing is judged twice.

Source: docs/decisions/0063-alerts.md
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from txbox.alerts import Alert, Alerting, dead, page
from txbox.app import App
from txbox.maintenance.pruning import Report, Task
from txbox.session import Session
from txbox.store.dialect import as_time
from txbox.store.jobs import JobLease

if TYPE_CHECKING:
    from txbox.admin.findings import Examination, Finding

#: Every worker of an App comes round this often; the first one does the work for all.
EVERY = timedelta(seconds=15)
_LEASE = 0.8
#: Told as soon as they are seen; others are once they have lasted for `Alerts.after`.
_AT_ONCE = frozenset({"quarantined-messages", "consumer-paused", "dead-outgoing"})
_LASTING = frozenset({"relay-away", "source-away", "consumer-unserved"})
#: In one round: an App that gets alerts only now may have any number of old failures.
_OPENED_MAX = 20
_FORGOTTEN_S = 7 * 86400.0


def pause(_app: App) -> timedelta:
    return EVERY


async def review(db: Session, app: App, task: Task) -> Report:
    """Say once a window what is still wrong and grows, or is resolved; open alerts that nobody has opened yet.

    Guarantee: an alert is open for as long as what it is about can be seen in the tables: a message that becomes dead
    in the moment in which its alert is closed opens it again here.
    """
    # a worker without alerts does without what operators need
    from txbox.admin import findings

    alerting, dialect = app.alerting, app.store.dialect
    if alerting is None or task.dry_run:
        return Report("alerts")
    if not task.at_any_time:
        lease_s = EVERY.total_seconds() * _LEASE
        # Apps with other channels or consumers do not review for this one
        name = f"alerts:{alerting.names}{app.routes.local}"
        if not await JobLease(dialect, name, secrets.token_hex(16), lease_s).acquire(db):
            return Report("alerts", skipped=True)
    diagnosis = await findings.read(db, app, dialect)
    case = findings.Examination(db, app, dialect)
    seen: dict[str, tuple[Alert, str | None]] = {}
    fresh: set[str] = set()
    for finding in diagnosis.findings:
        if not _is_ours(app, alerting, finding.code, finding.subject):
            continue
        async for alert, newest in _alerts_of(case, finding):
            lasts = finding.code not in _LASTING or (
                (finding.age_s or 0.0) >= alerting.alerts.after.total_seconds()
            )
            if seen.setdefault(alert.key, (alert, newest))[0] is alert and not lasts:
                fresh.add(alert.key)
    await db.begin()
    known = await alerting.listed(db, dialect)
    await db.commit()
    staged = 0
    for key, row in known.items():
        alert = Alert(**json.loads(row.state)["alert"])
        if task.stop() or not row.due or not _is_ours(app, alerting, alert.code, alert.subject):
            continue
        await db.begin()
        if key in seen:
            staged += await alerting.said(db, dialect, row, *seen[key])
        elif not diagnosis.unchecked:
            staged += await alerting.closed(db, dialect, alert)
        await db.commit()
    unopened = [alert for key, (alert, _) in seen.items() if key not in known and key not in fresh]
    if unopened:
        await db.begin()
        staged += await alerting.opened(db, dialect, unopened[:_OPENED_MAX])
        await db.commit()
    await dialect.run(db, "alerts_forgotten", {"older_than_s": _FORGOTTEN_S})
    return Report("alerts", staged)


def _is_ours(app: App, alerting: Alerting, code: str, subject: str) -> bool:
    """Whether this App tells of it: other Apps on the database may have alerts of their own."""
    if code == "relay-away":
        return subject not in alerting.routes
    consumers = app.handlers.consumers()
    if code in ("consumer-paused", "consumer-unserved", "dead-messages"):
        return not consumers or subject in consumers
    return code in _AT_ONCE | _LASTING


async def _alerts_of(
    case: Examination, finding: Finding
) -> AsyncIterator[tuple[Alert, str | None]]:
    """The alerts of a finding, and of those about dead messages when the newest one died."""
    from txbox.admin.tables import COUNTED_MAX

    if finding.code == "dead-messages":
        rows = await case.rows(
            "failure_groups", consumer=finding.subject, status="dead", most=COUNTED_MAX
        )
        more = (
            sum(int(row[2]) for row in rows) >= COUNTED_MAX and (finding.count or 0) > COUNTED_MAX
        )
        groups: dict[str | None, list[Any]] = {}
        for row in rows:
            groups.setdefault(row[0], []).append(row)
        for fingerprint, alike in groups.items():
            count = sum(int(row[2]) for row in alike)
            died = max((at for row in alike if (at := as_time(row[4])) is not None), default=None)
            yield (
                dead(finding.subject, fingerprint, str(alike[0][1]), count, more=more),
                None if died is None else died.isoformat(),
            )
    elif finding.count != 0:
        yield (
            Alert.about(
                finding.code, finding.subject, finding.problem, severity=finding.severity, count=finding.count,
                remedy=finding.remedy, page=page(finding.page, finding.query),
            ),
            None,
        )  # fmt: skip
