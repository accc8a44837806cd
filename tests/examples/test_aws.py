"""The Lambda function runs on a fake event."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT
from tests.support.databases import NewDatabase
from tests.support.waiting import DEADLINE_S
from txbox import Inbox


def test_lambda_reports_what_is_to_come_again(new_database: NewDatabase) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "aws_lambda_sqs.py")],
        env={**os.environ, "TXBOX_DATABASE_URL": new_database("postgresql", schema=False)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["{'batchItemFailures': []}", "[(1, 5)]"]


# the database is away: the whole FIFO group and the lone message come again, in their order
_AWAY = """
import os
os.environ["TXBOX_DATABASE_URL"] = "postgresql://nobody@127.0.0.1:9/nothing"
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
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("itemIdentifier") == 3


# another process is in the middle of g1's first message: g1 waits as a whole, g2 goes on
_HELD = """
import aws_lambda_sqs as function
from datetime import timedelta
from txbox import Limits
function.app.limits = Limits(lock_timeout=timedelta(seconds=0.1))
def record(number, group):
    own = {"stringValue": f"o-{number}", "dataType": "String"}
    return {"messageId": f"sqs-{number}", "body": '{"id": %d, "amount": 5}' % number,
            "attributes": {"MessageGroupId": group}, "messageAttributes": {"message-id": own},
            "eventSourceARN": "arn:aws:sqs:eu-west-1:123456789012:orders.fifo"}
batch = [record(1, "g1"), record(2, "g2"), record(3, "g1"), record(4, "g2")]
print(function.lambda_handler({"Records": batch}, None))
"""


def test_lambda_keeps_the_order_of_a_group(tmp_path: Path, postgresql_url: str) -> None:
    import psycopg

    script = tmp_path / "held.py"
    example = (ROOT / "examples" / "aws_lambda_sqs.py").read_text()
    text = example.replace('"orders", c', '"orders.fifo", c')
    (tmp_path / "aws_lambda_sqs.py").write_text(text)
    script.write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + _HELD)
    with psycopg.connect(postgresql_url) as other:
        other.execute("CREATE TABLE booking (order_id INTEGER, amount INTEGER)")
        other.commit()
        assert Inbox(consumer="billing").accept(other, "o-1", topic="orders.fifo", payload=b"")
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={**os.environ, "TXBOX_DATABASE_URL": postgresql_url},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == (
            "{'batchItemFailures': [{'itemIdentifier': 'sqs-1'}, {'itemIdentifier': 'sqs-3'}]}"
        )
        other.rollback()
        booked = other.execute("SELECT order_id FROM booking ORDER BY 1").fetchall()
    assert booked == [(2,), (4,)]
