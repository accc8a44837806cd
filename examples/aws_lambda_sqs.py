"""AWS Lambda on an SQS queue: each message by itself, failures reported one by one.

Lambda receives and deletes; txbox makes each message's effect happen once. In the event source mapping
switch on `ReportBatchItemFailures`: what this function names is delivered again, the rest is deleted.

    python examples/aws_lambda_sqs.py      # a fake event, as Lambda would pass it
"""

from __future__ import annotations

import os
import sqlite3
from datetime import timedelta
from typing import Any

from txbox import App, Limits, Message
from txbox.integrations.aws_lambda import sqs

# made once for each execution environment, outside the function
app = App(
    os.environ.get("DATABASE_URL", "sqlite:///lambda.db"),
    limits=Limits(unavailable_for=timedelta(seconds=3)),  # less than the function's time-out
)


@app.handler("orders", consumer="billing")
def book(message: Message[dict[str, Any]], tx: sqlite3.Connection) -> None:
    order = message.body
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (?, ?)", (order["id"], order["amount"])
    )


def lambda_handler(event: dict[str, Any], _context: object) -> dict[str, Any]:
    """Process a batch; returns what Lambda is to deliver again.

    What fails in its handler is not among it: that is parked in the table and deleted from the queue.
    """
    return sqs(app, event)


def main() -> None:
    app.init()  # once, at deployment
    database = sqlite3.connect("lambda.db")
    database.execute("CREATE TABLE IF NOT EXISTS booking (order_id INTEGER, amount INTEGER)")

    def record(number: int, own_id: str | None, body: str) -> dict[str, Any]:
        attributes = (
            {} if own_id is None else {"message-id": {"stringValue": own_id, "dataType": "String"}}
        )
        return {
            "messageId": f"sqs-{number}",
            "body": body,
            "attributes": {"ApproximateReceiveCount": "1"},
            "messageAttributes": attributes,
            "eventSourceARN": "arn:aws:sqs:eu-west-1:123456789012:orders",
        }

    event = {
        "Records": [
            record(1, "o-1", '{"id": 1, "amount": 5}'),
            record(2, "o-1", '{"id": 1, "amount": 5}'),  # the producer sent it again
            record(3, "o-2", '{"id": 2}'),  # fails: parked in the table, the queue is done with it
            record(4, None, '{"id": 3, "amount": 5}'),  # no id: set aside for a person
        ]
    }
    print(lambda_handler(event, None))
    print(database.execute("SELECT order_id, amount FROM booking").fetchall())
    database.close()
    app.close()


if __name__ == "__main__":
    main()
