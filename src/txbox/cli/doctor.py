"""doctor: what is wrong, with the command that mends it; an exit status for CI."""

from __future__ import annotations

import argparse
from typing import Any

from txbox.admin.doctor import SEVERITIES, Diagnosis, Finding
from txbox.admin.views import counted
from txbox.cli.application import admin_of
from txbox.cli.logs import add_grace
from txbox.cli.output import print_json, print_line, shown

_FAILED = 1


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    doctor = commands.add_parser(
        "doctor", parents=[common],
        description="Examines the database, its tables and the rows that wait; with --app, the App and its brokers, "
        "too. Each finding has a code, a severity (error, warning, note), its evidence and what mends it. What could "
        "not be looked at is told with the reason. Nothing is changed, and no table is read through.\n\n"
        "Exit status: 0 nothing as bad as --fail-on, 1 something, 2 wrong configuration or no database.",
    )  # fmt: skip
    doctor.add_argument(
        "--fail-on", choices=SEVERITIES[:2], default=SEVERITIES[0],
        help="how bad a finding must be for exit status 1 (default error)",
    )  # fmt: skip
    add_grace(doctor)
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    with admin_of(args) as admin:
        diagnosis = admin.doctor(grace=args.grace)
    if args.json:
        print_json({
            "findings": [_as_json(finding) for finding in diagnosis.findings],
            "unchecked": diagnosis.unchecked,
        })  # fmt: skip
    else:
        _print(diagnosis)
    return _FAILED if diagnosis.at_least(args.fail_on) else 0


def _as_json(finding: Finding) -> dict[str, str]:
    return {
        "code": finding.code,
        "severity": finding.severity,
        "problem": finding.problem,
        "remedy": finding.remedy,
    }


def _print(diagnosis: Diagnosis) -> None:
    for finding in diagnosis.findings:
        print_line(f"{finding.severity}  {finding.code}")
        print_line(f"    {shown(finding.problem)}")
        print_line(f"    -> {shown(finding.remedy)}")
    for unchecked in diagnosis.unchecked:
        print_line(f"not checked  {shown(unchecked.what)}: {shown(unchecked.why)}")
    counts = (
        counted(sum(one.severity == severity for one in diagnosis.findings), severity)
        for severity in SEVERITIES
    )
    print_line(f"{', '.join(counts)}." if diagnosis.findings else "Nothing is wrong.")
