"""`txbox doctor`: what is wrong, the evidence and the remedy; and what could not be examined.

database.py examines the server and its tables, app.py an App and its brokers, ../findings.py rows and processes.
Nothing there writes, and nothing scans a table.

Source: docs/decisions/0035-doctor.md
"""

from __future__ import annotations

from txbox.admin.findings import (
    CODES,
    SEVERITIES,
    Diagnosis,
    Finding,
    Severity,
    Unchecked,
    worst_first,
)

__all__ = ["CODES", "SEVERITIES", "Diagnosis", "Finding", "Severity", "Unchecked", "worst_first"]
