"""docs/contract.md and its kit: a program that follows the page passes, and a wrong one fails at its sentence."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.databases import NewDatabase, Raw
from tests.support.waiting import DEADLINE_S
from txbox.cli import main
from txbox.testing import conformance

_ROOT = Path(__file__).parents[2]
_NODE = _ROOT / "examples" / "node"

#: What is wrong with the program → the sentence that says so, and those that fail for the same reason; with "…" the
#: program is so wrong that many do.
_WRONG = {
    "any version": "1.1",
    "ids in lower case": "2.1",
    "long ids as they are": "2.2",
    "any id": "2.3",
    "hash of canonical JSON": "2.4",
    "claim committed first": "3.1 …",
    "repeatable read": "3.2",
    "no idle limit": "3.2",
    "one token": "3.3",
    "closed at once": "3.3 3.1 5.7",  # whose rows were written under a guard that was never armed
    "no savepoint": "3.4",
    "no close": "3.4 3.12",  # close flushes
    "believes COMMIT": "3.5",
    "answers before COMMIT": "3.6",
    "only processed is done": "3.7",
    "check then insert": "3.8 3.1 3.3",  # nothing is claimed while the handler runs
    "what waits is a duplicate": "3.9",
    "payload not compared": "3.10 3.12 7.1",  # which have a row in the quarantine
    "another hash aside": "3.10",
    "copies aside are not counted": "3.10",
    "a lost connection fails": "3.11",
    "processing is not flushed": "3.12",
    "failures are not flushed": "3.12",
    "the quarantine is not flushed": "3.12",
    "the payload is not kept": "4.1",
    "no history": "4.1 3.9 3.12 4.4 5.8 7.1",  # which look at the attempts, or that they are flushed
    "over a processed row": "4.2",
    "clock of the process": "4.3",
    "at once": "4.3",
    "never dead": "4.4",
    "leases what is dead": "4.4 5.1",
    "leases before it is due": "5.1 4.3",
    "leases without a payload": "5.1",
    "leases for all": "5.1 …",
    "one lease": "5.2",
    "the start is not counted": "5.2 5.6",  # where rescue leaves it counted
    "clock of the process, leases": "5.2",
    "takes locked rows": "5.3",
    "suspects in a batch": "5.4",
    "heartbeat for all": "5.5",
    "no fence": "5.6",
    "keeps the error": "5.7",
    "the start is not given back": "5.7",
    "the attempt is not counted": "5.8 4.4",
    "no fence of failures": "5.8",
    "leases what is paused": "5.9",
    "staged outside": "6.1",
    "headers as an object": "6.2",
    "no cause": "6.2",
    "no route": "6.2",
    "discards failures": "7.1 …",
    "no inbox": "8.1 …",
    "leases nothing in the table": "8.2 …",
}
#: Sentence → what is replaced in inbox.mjs by what, so that it no longer holds.
_WRONG_IN_NODE = {
    "1.1": ("rows[0].compatible_from > 1", "false"),
    "2.1": ('toString("hex") : id;', 'toString("hex") : id.trim();'),
    "2.2": ('id.startsWith("sha256:")', "false"),
    "2.4": ("payload === null ? Buffer.alloc(32) : sha256(payload)", 'sha256(payload ?? "")'),
    "3.2": (
        'READ COMMITTED");\n      await client.query(ARM',
        'SERIALIZABLE");\n      await client.query(ARM',
    ),
    "3.3": ("const guard = token();", 'const guard = "the same";'),
    "3.4": ('["3B001", "25P01"].includes(error.code)', "false"),
    "3.5": (
        "await client.query(CLOSE, [guard]);",
        "await client.query(CLOSE, [guard]).catch(() => {});",
    ),
    "3.6": ('await client.query("COMMIT"); //', 'client.query("COMMIT").catch(() => {}); //'),
    "3.7": (
        'const FINISHED = ["processed", "dead", "discarded"]',
        'const FINISHED = ["processed"]',
    ),
    "3.8": ('["55P03", "40001", "40P01"]', '["40001", "40P01"]'),
    "3.9": ('waits ? "deferred"', 'waits ? "duplicate"'),
    "3.10": ("!known.equals(hash)", "false"),
    "3.11": ("client.lost || [", "["),
    "4.1": ("$6, $7, $6, $12, true)", "$6, $7, $6, $12, $12 IS NULL)"),
    "4.3": ("this.maxAttempts, this.retryS, name", "this.maxAttempts, 0, name"),
    "5.3": ("LIMIT $3 FOR UPDATE SKIP LOCKED", "LIMIT $3 FOR UPDATE NOWAIT"),
    "5.6": (
        "AND token = $3 AND status = 'processing'\n            RETURNING",
        "AND $3::text > ''\n            RETURNING",
    ),
    "5.9": ("AND NOT EXISTS (", "AND true OR NOT EXISTS ("),
    "6.2": ('[["causation-id", cause.id]]', '{ "causation-id": cause.id }'),
}


def _command(variant: str = "") -> str:
    program = [sys.executable, "-m", "tests.support.conformance_program", variant]
    return shlex.join(program)


def test_the_page_has_the_sentences_that_the_kit_checks() -> None:
    page = (_ROOT / "docs" / "contract.md").read_text()
    written = re.findall(r"^\*\*(\d+\.\d+)\*\* (.+)$", page, re.MULTILINE)
    assert written == list(conformance.SENTENCES.items())
    assert all("MUST" in text for _, text in written)
    assert f"Version {conformance.VERSION}," in page


def test_a_program_that_follows_the_page_passes(new_database: NewDatabase) -> None:
    """Its statements are those of the page."""
    url = new_database("postgresql", schema=False)
    report = conformance.run(url, _command())
    assert report.ok, str(report)
    assert len(report.findings) == len(conformance.SENTENCES)
    with Raw(url) as raw:
        for table in ("inbox", "attempt", "quarantine", "outbox", "pause"):
            assert raw.value(f"SELECT count(*) FROM txbox_{table}") == 0


def test_every_sentence_can_fail(new_database: NewDatabase) -> None:
    """One wrong program for each."""
    url = new_database("postgresql")
    programs = {numbers.split()[0]: variant for variant, numbers in reversed(_WRONG.items())}
    assert set(programs) == set(conformance.SENTENCES)
    for number, variant in programs.items():
        assert _failed(url, _command(variant), number) == [number], variant


@pytest.mark.slow  # a whole run for each
@pytest.mark.parametrize("variant", _WRONG)
def test_a_wrong_program_fails_at_its_sentence_and_only_there(
    new_database: NewDatabase, variant: str
) -> None:
    wanted = _WRONG[variant].split()
    failed = _failed(new_database("postgresql"), _command(variant))
    assert wanted[0] in failed
    if wanted[-1] != "…":
        assert sorted(failed) == sorted(wanted)


def _failed(url: str, command: str, *only: str) -> list[str]:
    """The numbers of the sentences that do not hold."""
    report = conformance.run(url, command, only=only)
    return [finding.number for finding in report.findings if finding.problem is not None]


def test_txbox_itself_passes(new_database: NewDatabase) -> None:
    """What the page says is what this release does."""
    report = conformance.run(
        new_database("postgresql"),
        shlex.join([sys.executable, "-m", "tests.support.conformance_txbox"]),
    )
    assert report.ok, str(report)


@pytest.mark.slow  # needs its driver, from a registry: `make test-contract`
def test_the_implementation_in_node_passes(new_database: NewDatabase) -> None:
    report = conformance.run(new_database("postgresql"), _in_node(_NODE))
    assert report.ok, str(report)


@pytest.mark.slow  # as above
def test_a_wrong_implementation_in_node_fails_at_the_sentence(
    new_database: NewDatabase, tmp_path: Path
) -> None:
    url, failed = new_database("postgresql"), dict[str, list[str]]()
    for number, (right, wrong) in _WRONG_IN_NODE.items():
        program = tmp_path / number
        shutil.copytree(_NODE, program, ignore=shutil.ignore_patterns("node_modules"))
        (program / "node_modules").symlink_to(_NODE / "node_modules")
        source = (program / "inbox.mjs").read_text()
        assert source.count(right) == 1, right
        (program / "inbox.mjs").write_text(source.replace(right, wrong))
        failed[number] = _failed(url, _in_node(program), number)
    assert failed == {number: [number] for number in _WRONG_IN_NODE}


@pytest.mark.slow  # as above
def test_the_readme_of_the_example_runs(new_database: NewDatabase) -> None:
    command, url = shlex.split(_in_node(_NODE)), new_database("postgresql")
    (block,) = re.findall(r"```js\n(.+?)```", (_NODE / "README.md").read_text(), re.DOTALL)
    with Raw(url) as raw:
        raw.execute("CREATE TABLE account (balance integer)")
        raw.execute("INSERT INTO account VALUES (100)")
        for _ in range(2):
            subprocess.run(
                [command[0], "--input-type=module"], input=block + "await pool.end();", text=True, check=True,
                cwd=_NODE, env=os.environ | {"TXBOX_DATABASE_URL": url}, timeout=DEADLINE_S,
            )  # fmt: skip
        assert raw.value("SELECT balance FROM account") == 70
        assert raw.rows("SELECT status, consumer FROM txbox_inbox") == [("processed", "billing")]
        assert raw.rows("SELECT topic, route FROM txbox_outbox") == [("invoices", "kafka")]


def _in_node(program: Path) -> str:
    node = shutil.which("node")
    if node is None or not (_NODE / "node_modules").is_dir():
        pytest.skip("Node or its driver is missing: make test-contract")
    return shlex.join([node, str(program / "conformance.mjs")])


def test_the_command_reports_each_sentence(
    new_database: NewDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    url = new_database("postgresql")
    words = ["conformance", "--database", url, "--only", "2.1", "3.10", "--command"]
    assert main([*words, _command("ids in lower case")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAILED 2.1  An id of 1 to 255 bytes")
    assert lines[2].startswith("ok     3.10 Another payload")
    assert "2 sentences of contract 1, 1 failed" in lines[-1]
    assert main([*words, _command(), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["contract"], answer["ok"]) == (1, True)
    assert [one["number"] for one in answer["sentences"]] == ["2.1", "3.10"]


def test_it_refuses_what_it_cannot_check(
    new_database: NewDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    url = new_database("postgresql")
    for words, sentence in (
        (["--database", "sqlite:///x.db", "--command", "true"], "Contract 1 is about PostgreSQL"),
        (["--database", url, "--command", "true", "--only", "9.9"], "no sentence 9.9"),
        (["--database", url, "--command", "/does/not/exist"], "cannot be started"),
        (["--command", "true"], "takes --database"),
    ):
        assert main(["conformance", *words]) == 2
        assert sentence in capsys.readouterr().err
    with Raw(url) as raw:
        raw.execute(
            "INSERT INTO txbox_inbox (consumer, message_id, status, topic) VALUES ('c', '1', 'pending', 't')"
        )
    assert main(["conformance", "--database", url, "--command", "true"]) == 2
    assert "txbox_inbox is not empty" in capsys.readouterr().err


def test_a_program_that_says_nothing_fails(new_database: NewDatabase) -> None:
    """It ends, says something else than JSON, or speaks another version."""
    url = new_database("postgresql")
    for program, problem in (
        ("pass", "has ended"),
        ("print('hello')", "no JSON object"),
        ("print(7)", "no JSON object"),
        ("print('{\"contract\": 2}')", "the first line"),
    ):
        report = conformance.run(url, shlex.join([sys.executable, "-c", program]), only=["2.1"])
        assert problem in str(report.findings[0].problem)
