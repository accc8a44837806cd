"""Every source is named where a reader looks for it, and the words that promise too much are nowhere."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import ROOT, all_pages, page

_SOURCES = {
    "kafka": ("Kafka", "Kafka"),
    "rabbitmq": ("RabbitMQ", "RabbitMQ"),
    "sqs": ("SQS", "SQS"),
    "nats": ("Nats", "NATS"),
    "redis": ("RedisStreams", "Redis"),
    "webhook": ("Webhook", "webhook"),
    "file": ("File", "File"),
    "local": ("Local", "Local"),
}
_NO_PAGE_OF_THEIR_OWN = {"file", "local"}


def test_no_source_is_forgotten_here() -> None:
    found = (ROOT / "src/txbox/brokers").iterdir()
    brokers = {path.stem for path in found if not path.name.startswith("_")}
    # http only sends, and facts are those that doctor reads
    assert set(_SOURCES) == brokers - {"base", "envelope", "facts", "http", "loop"}


@pytest.mark.parametrize("module", _SOURCES)
def test_the_table_has_a_row_with_every_cell(module: str) -> None:
    name, _ = _SOURCES[module]
    (row,) = (
        line
        for line in page("docs/reference/brokers.md").text.splitlines()
        if line.startswith((f"| [`{name}`]", f"| `{name}`"))
    )
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 5
    assert all(cells)


@pytest.mark.parametrize("module", sorted(set(_SOURCES) - _NO_PAGE_OF_THEIR_OWN))
def test_readme_and_index_name_it(module: str) -> None:
    _, spoken = _SOURCES[module]
    assert spoken.lower() in page("README.md").prose.lower()
    assert f"(howto/{module}.md)" in page("docs/index.md").text


def test_every_extra_is_in_the_readme() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prose = page("README.md").prose
    for extra in extras["optional-dependencies"]:
        assert re.search(rf"[`\[]{extra}[`\]]", prose), f"the extra {extra} is not in the README"


def test_nobody_promises_delivery_that_cannot_be() -> None:
    for each in all_pages():
        assert not re.search(r"exactly[- ]once[- ]delivery", each.text, re.IGNORECASE), each.name
