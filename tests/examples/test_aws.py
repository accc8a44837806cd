"""The Lambda function runs on a fake event."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def test_lambda_reports_what_is_to_come_again(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "aws_lambda_sqs.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["{'batchItemFailures': []}", "[(1, 5)]"]


# the database is away: the whole FIFO group and the lone message come again, in their order
_AWAY = """
import os
os.environ["DATABASE_URL"] = "postgresql://nobody@127.0.0.1:9/nothing"
import aws_lambda_sqs as function
from datetime import timedelta
from txbox import Limits
function.app.limits = Limits(unavailable_for=timedelta(seconds=0.1))
def record(number, group):
    return {"messageId": f"sqs-{number}", "body": "{}", "messageAttributes": {},
            "attributes": {"MessageGroupId": group} if group else {},
            "eventSourceARN": "arn:aws:sqs:eu-west-1:123456789012:orders"}
print(function.lambda_handler({"Records": [record(1, "g"), record(2, "g"), record(3, None)]}, None))
"""


def test_lambda_returns_everything_while_the_database_is_away(tmp_path: Path) -> None:
    script = tmp_path / "away.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT / 'examples')!r})\n" + _AWAY)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("itemIdentifier") == 3
