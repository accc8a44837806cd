"""Metrics of real work, and that dashboard and alerts only query metrics that exist."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.shop import CONSUMER, TOPIC, Shop, opened, paid
from tests.support.sources import Memory
from tests.support.workers import worker
from txbox import Message, Outcome, Reject
from txbox.brokers.webhook import GitHub, Webhook
from txbox.events import Event, MessageProcessed
from txbox.observers.counters import Counters
from txbox.worker.health import Health
from txbox.worker.serving import probes

OPS = Path(__file__).parents[2] / "ops"


def page(counters: Counters) -> str:
    registry = CollectorRegistry()
    registry.register(counters)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[str, float]:
    """Return each sample by name and labels, as read by the official parser."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def buckets(found: dict[str, float], name: str) -> list[float]:
    begins = f"txbox_{name}_bucket{{consumer={CONSUMER},le="
    return [value for key, value in found.items() if key.startswith(begins)]


def test_every_message_and_every_transaction_is_in_its_buckets(database_url: str) -> None:
    counters = Counters()

    def body(message: Message[Any], tx: Any) -> None:
        if str(message.id) == "7":
            raise Reject("declined")

    with opened(database_url, observers=[counters]) as shop:
        shop.handler(body)
        shop.app.consume(Memory([paid(number) for number in range(40)]))
        assert worker(shop.app, once=True).run() == 0
        found = samples(page(counters))
        processed = shop.emitted(MessageProcessed)
    labels = f"{{consumer={CONSUMER}}}"
    assert found[f"txbox_latency_seconds_count{labels}"] == len(processed) == 39
    assert found[f"txbox_latency_seconds_sum{labels}"] == pytest.approx(
        sum(event.latency_s for event in processed)
    )
    assert all(event.latency_s >= event.duration_s > 0 for event in processed)
    transactions = found[f"txbox_batch_messages_count{labels}"]
    assert 1 <= transactions <= 40
    # a message that fails alone is in no transaction, one that fails under a savepoint is in that of its neighbours
    assert found[f"txbox_batch_messages_sum{labels}"] in (39, 40)
    for name in ("handler_seconds", "commit_seconds"):
        assert found[f"txbox_{name}_count{labels}"] == transactions
        assert found[f"txbox_{name}_sum{labels}"] > 0
    for name in ("latency_seconds", "handler_seconds", "commit_seconds", "batch_messages"):
        counted = buckets(found, name)
        assert counted == sorted(counted)
        assert counted[-1] == found[f"txbox_{name}_count{labels}"]


def test_the_time_in_the_table_is_part_of_the_latency(postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        shop.handler(mode="stored")
        assert shop.deliver(paid("a")) is Outcome.DEFERRED
        shop.raw.execute("UPDATE txbox_inbox SET received_at = received_at - interval '1 hour'")
        assert shop.work() == [Outcome.PROCESSED]
        (event,) = shop.emitted(MessageProcessed)
    assert 3600 <= event.latency_s < 3700


def test_a_handler_without_a_transaction_is_timed_too(shop: Shop) -> None:
    counters = Counters()
    shop.app.events.observers.append(counters)

    @shop.app.handler(TOPIC, consumer=CONSUMER, transactional=False)
    def mail(message: Message[Any]) -> None: ...

    assert shop.deliver(paid("a")) is Outcome.PROCESSED
    found = samples(page(counters))
    for name in ("latency_seconds", "handler_seconds", "commit_seconds", "batch_messages"):
        assert found[f"txbox_{name}_count{{consumer={CONSUMER}}}"] == 1


def test_a_value_on_a_bound_is_below_it() -> None:
    counters = Counters()
    for latency_s in (0.001, 0.0011, 3600.0, 9e9, None):
        counters(MessageProcessed(consumer=CONSUMER, latency_s=latency_s))
    counted = buckets(samples(page(counters)), "latency_seconds")
    assert (counted[0], counted[1], counted[-2], counted[-1]) == (1, 2, 3, 4)


# -- what is asked for -----------------------------------------------------------------------------

_SELECTOR = re.compile(r"\b(txbox_\w+)(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\b(?:by|without|on)\s*\(([^)]*)\)")
# what Prometheus, or a parent of several processes, adds
_ADDED = {"instance", "job", "process"}


def every_event() -> Iterator[Event]:
    def subclasses(kind: type[Event]) -> Iterator[type[Event]]:
        for found in kind.__subclasses__():
            yield found
            yield from subclasses(found)

    for kind in subclasses(Event):
        values: Any = {
            field.name: "x" if "str" in str(field.type) else 1
            for field in fields(kind)
            if field.name != "exception"
        }
        yield kind(**values)


def exported() -> dict[str, set[str]]:
    """Return the labels of each metric of a worker that has seen every event."""
    counters, hook = Counters(), Webhook(topic="hooks", path="/hook", verify=GitHub("s" * 32))
    for event in every_event():
        counters(event)
    hook.answers[200] += 1
    found: dict[str, set[str]] = {"txbox_process_up": {"process"}}
    for family in text_string_to_metric_families(asyncio.run(served(Health(), counters, hook))):
        if family.type == "gauge":
            # without a sample only the name is known
            found[family.name] = set(_GAUGES.get(family.name, ()))
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


_GAUGES = {
    "txbox_in_flight": {"source"}, "txbox_source_silent_seconds": {"source"}, "txbox_rows_leased": {"consumer"},
    "txbox_route_away_seconds": {"route"}, "txbox_source_away_seconds": {"source"},
}  # fmt: skip


async def served(health: Health, counters: Counters, hook: Webhook) -> str:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("a page has no body to be read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": "/metrics", "method": "GET", "headers": []}
    await probes(health, counters, [hook])(scope, receive, send)
    return b"".join(message.get("body", b"") for message in sent).decode()


def wrong(expression: str, known: dict[str, set[str]]) -> list[str]:
    """Return names and labels in a query that no metric has."""
    selected = list(_SELECTOR.finditer(expression))
    said = [f"{found[1]} is not exported" for found in selected if found[1] not in known]
    labels = {label for found in selected for label in known.get(found[1], set())} | _ADDED
    for found in selected:
        has = known.get(found[1], set()) | _ADDED
        asked = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", found[2] or "")
        said += [f"{found[1]} has no label {label}" for label in asked if label not in has]
    for grouped in _GROUPED.findall(expression):
        said += [
            f"no {name.strip()} in {expression}"
            for name in grouped.split(",")
            if name.strip() not in labels
        ]
    return said if selected else [f"nothing of txbox in {expression}"]


def test_the_check_sees_what_is_wrong() -> None:
    known = exported()
    assert wrong("rate(txbox_message_total[5m])", known) == ["txbox_message_total is not exported"]
    assert wrong('txbox_ready{consumer="a"}', known) == ["txbox_ready has no label consumer"]
    assert len(wrong("sum by (topic) (txbox_messages_total)", known)) == 1
    assert wrong("up == 0", known)
    assert not wrong('sum by (consumer, le) (txbox_latency_seconds_bucket{le="1"})', known)


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((OPS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_alerts_ask_for_what_is_exported() -> None:
    known = exported()
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 12
    for rule in rules:
        assert not wrong(rule["expr"], known), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}
        grouped = {
            name.strip() for found in _GROUPED.findall(rule["expr"]) for name in found.split(",")
        }
        named = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        kept = grouped | (_ADDED if " by " not in rule["expr"] else set())
        assert named <= kept, f"{rule['alert']} names labels that its query drops"


def test_the_dashboard_asks_for_what_is_exported() -> None:
    known = exported()
    board = json.loads((OPS / "grafana.json").read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked += [
        variable["query"] for variable in board["templating"]["list"] if variable["type"] == "query"
    ]
    assert len(asked) > 25
    for expression in asked:
        assert not wrong(expression, known), expression
    # a metric on no panel was forgotten
    used = {name for expression in asked for name, _ in _SELECTOR.findall(expression)}
    bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in used}
    exported_bases = {re.sub(r"_(bucket|count|sum)$", "", name) for name in known}
    assert exported_bases - bases == {
        "txbox_process_up", "txbox_paused_seconds_total", "txbox_relay_paused_seconds_total", "txbox_rows_pruned_total",
        "txbox_lost_upstream_total", "txbox_lost_commits_total", "txbox_sources_refused_total",
        "txbox_logins_refused_total", "txbox_source_away_seconds", "txbox_route_away_seconds",
    }  # fmt: skip
