"""The audit: who changes rows and why, and the row of `txbox_audit` that says so."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from txbox.steps import Statement
from txbox.store.dialect import Dialect
from txbox.store.filters import OutgoingFilter, QuarantineFilter, RowFilter

#: What becomes of rows; also the names of the queries that do it.
Change = Literal["retry", "discard", "reroute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """Who changes rows, and why; written into `txbox_audit` with the change."""

    actor: str
    reason: str | None = None

    def statement(
        self,
        dialect: Dialect,
        action: str,
        where: RowFilter | OutgoingFilter | QuarantineFilter,
        *,
        affected: int,
    ) -> Statement:
        """The statement that records a change of so many rows."""
        return dialect.statement(
            "audit",
            {
                "actor": self.actor,
                "action": action,
                "filter": json.dumps(where.criteria(), sort_keys=True),
                "affected": affected,
                "reason": self.reason,
            },
        )
