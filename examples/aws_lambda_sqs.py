"""AWS Lambda on an SQS queue: each message by itself, failures reported one by one.

Lambda receives and deletes; txbox makes each message's effect happen once. In the event source mapping
switch on `ReportBatchItemFailures`: what this function names is delivered again, the rest is deleted.

    pip install 'txbox[postgresql]'
    export TXBOX_DATABASE_URL=postgresql://localhost/shop
    python aws_lambda_sqs.py      # a fake event, as Lambda would pass it
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import psycopg

from txbox import App, Limits, Message
from txbox.integrations.aws_lambda import sqs

# made once for each execution environment, outside the function
app = App(
    os.environ.get("TXBOX_DATABASE_URL", "postgresql://localhost/shop"),
    limits=Limits(unavailable_for=timedelta(seconds=3)),  # less than the function's time-out
)


@app.handler("orders", consumer="billing")
def book(message: Message[dict[str, Any]], tx: psycopg.Connection) -> None:
    order = message.body
    tx.execute(
        "INSERT INTO booking (order_id, amount) VALUES (%s, %s)", (order["id"], order["amount"])
    )


def lambda_handler(event: dict[str, Any], _context: object) -> dict[str, Any]:
    """Process a batch; returns what Lambda is to deliver again.

    What fails in its handler is not among it: that is parked in the table and deleted from the queue.
    """
    return sqs(app, event)


def main() -> None:
    app.init()  # once, at deployment
    with app.transaction() as tx:
        tx.execute("CREATE TABLE IF NOT EXISTS booking (order_id int, amount int)")

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
    with app.transaction() as tx:
        print(tx.execute("SELECT order_id, amount FROM booking").fetchall())
    app.close()


if __name__ == "__main__":
    main()
