"""Servers for the tests: given by URL, from docker compose, or from packages.

`python -m tests.support.servers up | run -- <command> | down | env`; `up` and `run` take `--databases`,
`--brokers` or `--only a,b`.

The URLs of running servers stand in `.servers.json` at the repository's root; `TXBOX_TEST_*_URL`
variables go before it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
STATE_FILE = ROOT / ".servers.json"

VARIABLES = {
    "postgresql": "TXBOX_TEST_POSTGRESQL_URL",
    "mariadb": "TXBOX_TEST_MARIADB_URL",
    "mysql": "TXBOX_TEST_MYSQL_URL",
    "pgbouncer": "TXBOX_TEST_PGBOUNCER_URL",
    "postgresql-durable": "TXBOX_BENCH_POSTGRESQL_URL",
    "mariadb-durable": "TXBOX_BENCH_MARIADB_URL",
    "rabbitmq": "TXBOX_TEST_RABBITMQ_URL",
    "redis": "TXBOX_TEST_REDIS_URL",
    "nats": "TXBOX_TEST_NATS_URL",
    "kafka": "TXBOX_TEST_KAFKA_BOOTSTRAP",
    "sqs": "TXBOX_TEST_SQS_URL",
}
BROKERS = ("rabbitmq", "redis", "nats", "kafka", "sqs")


class ServerError(Exception):
    """One sentence: which server is missing, and what to do."""


class UnavailableError(ServerError):
    """This machine cannot have the server: something it needs cannot be had here."""


class UnofferedError(UnavailableError):
    """Nothing that this machine installs from has the server: no fault of the machine, even in CI."""


def server_urls() -> dict[str, str]:
    """URLs of the known servers, by name; whether they answer is not checked here."""
    urls: dict[str, str] = {}
    if STATE_FILE.exists():
        urls.update(json.loads(STATE_FILE.read_text()))
    for name, variable in VARIABLES.items():
        if given := os.environ.get(variable):
            urls[name] = given
    return urls


def given_url(name: str) -> str | None:
    """The URL that the environment gives for this server, None when it gives none."""
    return os.environ.get(VARIABLES[name]) or None


def programs(kind: str, otherwise: str) -> str:
    """The PATH on which the programs of a kind of server are looked for.

    `TXBOX_TEST_REDIS_PROGRAMS` is that of another release; the matrix of versions sets it.
    """
    return os.environ.get(f"TXBOX_TEST_{kind.upper()}_PROGRAMS") or otherwise


def servers_required() -> bool:
    """True where a missing server must fail the tests instead of skipping them."""
    return any(
        os.environ.get(name, "").lower() in ("1", "true", "yes")
        for name in ("TXBOX_REQUIRE_SERVERS", "CI")
    )
