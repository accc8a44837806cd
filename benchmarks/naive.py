"""The yardstick: the textbook idempotent consumer in psycopg, one connection, one transaction a message."""

from __future__ import annotations

import json
from typing import Any

import psycopg

from benchmarks.workload import Delivery, Work, create_tables, take_payment

INBOX_ROWS = "SELECT count(*) FROM naive_inbox"


class Naive:
    """BEGIN, INSERT … ON CONFLICT DO NOTHING RETURNING, UPDATE, INSERT, COMMIT."""

    name = "naive"

    def __init__(self, url: str) -> None:
        self._url = url
        # psycopg sends BEGIN by itself, and prepares statements from their fifth execution on
        self._connection: psycopg.Connection[Any] = psycopg.connect(url)

    def prepare(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as admin:
            create_tables(admin)
            admin.execute("DROP TABLE IF EXISTS naive_inbox")
            admin.execute(
                "CREATE TABLE naive_inbox (consumer text NOT NULL, message_id text NOT NULL, "
                "received_at timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (consumer, message_id))"
            )
            admin.execute("CHECKPOINT")

    def consume(self, delivery: Delivery) -> None:
        connection = self._connection
        claimed = connection.execute(
            "INSERT INTO naive_inbox (consumer, message_id) VALUES (%s, %s) "
            "ON CONFLICT DO NOTHING RETURNING message_id",
            ("billing", delivery.id),
        ).fetchone()
        if claimed is not None:
            take_payment(json.loads(delivery.payload), connection)
        connection.commit()

    def consume_all(self, work: Work) -> None:
        for delivery in work.deliveries:
            self.consume(delivery)

    def close(self) -> None:
        self._connection.close()
