"""The File source: how lines become messages, and where reading continues."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.backup import Backup
from tests.support.databases import Raw
from tests.support.servers import ROOT
from tests.support.shop import CONSUMER, TOPIC, Shop, as_id, effects, opened, quarantined
from tests.support.sources import event_line, write_events
from tests.support.waiting import DEADLINE_S, eventually
from tests.support.workers import running, worker
from txbox import ConfigurationError, Message
from txbox.brokers.base import Delivery
from txbox.brokers.file import File
from txbox.errors import StoreUnavailable
from txbox.testing.brokers import Alone


class Kept(Alone):
    """A progress in memory; `others` is what another process holds."""

    def __init__(self) -> None:
        super().__init__()
        self.lease_s = 60.0
        self.acquired = 0
        self.saves = 0
        self.state: str | None = None
        self.held_by_another = False
        self.lost = False
        self.away = False

    def acquire(self) -> bool:
        self.acquired += 1
        return not self.held_by_another

    def load(self) -> str | None:
        return self.state

    def save(self, state: str) -> bool:
        if self.away:
            raise StoreUnavailable("The database is away.")
        if self.lost:
            return False
        self.state = state
        self.saves += 1
        return True

    def release(self) -> None:
        pass


def read(source: File, progress: Kept, *, settle: bool = True) -> list[Delivery]:
    """Open, read all there is, settle, close."""
    consumer = source.consumer(["*"], progress)
    found: list[Delivery] = []
    while received := list(consumer.receive(10, 0.0)):
        found += received
        if settle:
            consumer.settle(received)
    consumer.close()
    return found


def ids(deliveries: list[Delivery]) -> list[str | None]:
    return [
        None if delivery.message is None else delivery.message.headers.text("ce_id")
        for delivery in deliveries
    ]


def one(tmp_path: Path, line: str | bytes) -> Delivery:
    path = tmp_path / "events.jsonl"
    path.write_bytes(line if isinstance(line, bytes) else line.encode())
    (found,) = read(File(path), Kept())
    return found


def message(tmp_path: Path, line: str) -> Message[Any]:
    found = one(tmp_path, line).message
    assert found is not None
    return found


# -- what a line becomes ----------------------------------------------------------------------


def test_an_event_becomes_a_message_with_its_data_as_it_was_written(tmp_path: Path) -> None:
    found = message(
        tmp_path,
        '{"id": "7", "source": "https://x/y z", "type": "paid", "subject": "k", "traceparent": "00-1",'
        ' "time": "2024-05-01T10:00:00Z", "data": {"b" :  1.10, "a":"\\u00e9"} , "x": {"data": 0}}\n',
    )
    assert found.payload == b'{"b" :  1.10, "a":"\\u00e9"}'
    assert found.id == "https://x/y%20z 7"
    assert (found.topic, found.type, found.key) == ("events", "paid", "k")
    assert found.content_type == "application/json"
    assert found.time is not None
    assert found.time.isoformat() == "2024-05-01T10:00:00+00:00"
    assert found.headers.text("ce_traceparent") == "00-1"
    assert found.origin == {"file": "events.jsonl", "offset": 0}


@pytest.mark.parametrize(
    ("more", "payload"),
    [
        ('"data": null', b"null"),
        ('"data": ""', b'""'),
        ('"data": [1, 2]', b"[1, 2]"),
        ('"data": 12345678901234567890.10', b"12345678901234567890.10"),
        ('"data": "a\\"}", "z": 1', b'"a\\"}"'),
        ('"data": "é"', '"é"'.encode()),
        ('"data": 1, "data": 2', b"2"),
        ('"data": "<a/>", "datacontenttype": "text/xml"', b"<a/>"),
        ('"data": {"a":1}, "datacontenttype": "application/vnd.x+json; v=1"', b'{"a":1}'),
        (f'"data_base64": "{base64.b64encode(bytes(range(256))).decode()}"', bytes(range(256))),
        ('"x": 1', None),
    ],
)
def test_payloads(tmp_path: Path, more: str, payload: bytes | None) -> None:
    assert message(tmp_path, f'{{"id": "1", {more}}}').payload == payload


def test_an_event_without_source_is_known_by_its_plain_id(tmp_path: Path) -> None:
    assert message(tmp_path, '{"id": 17}').id == "17"
    assert message(tmp_path, '{"data": 1}').id is None


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1]",
        b'"text"',
        b"{",
        b'{"id": "1"',
        b'{"id": "1",}',
        b'{"id": "1"} trailing',
        b'{"id": NaN}',
        b"{1: 2}",
        b'{"id": "\xff"}',
        b'{"id": "1", "type": ["x"]}',
        b'{"id": "1", "subject": {}}',
        b'{"id": "1", "data_base64": "?"}',
        b'{"data": ' + b"[" * 100_000,
        b"\x00\x01",
    ],
)
def test_a_malformed_line_is_a_problem_with_its_bytes(tmp_path: Path, line: bytes) -> None:
    found = one(tmp_path, line)
    assert found.message is None
    assert found.raw == line
    assert found.problem is not None
    assert "events.jsonl" in found.problem


def test_an_endless_line_costs_no_memory_and_its_neighbours_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("w") as file:
        file.write(event_line("a"))
        for _ in range(300):
            file.write("x" * 10_000)
        file.write("\n" + event_line("b") + "y" * 3_000_000)
    source = File(path, line_bytes=100_000)
    found = read(source, Kept())
    assert ids(found) == ["a", None, "b", None]
    assert [len(row.raw) <= 65_536 for row in found] == [True] * 4
    assert "longer than 100000 bytes" in str(found[1].problem)


# -- how far it came --------------------------------------------------------------------------


def test_progress_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, range(25))
    kept = Kept()
    assert len(read(File(path), kept)) == 25
    assert read(File(path), kept) == []
    with path.open("a") as file:
        file.write("\n" + event_line(25))
    assert ids(read(File(path), kept)) == ["25"]


def test_only_the_gapless_settled_front_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, range(5))
    kept = Kept()
    source = File(path).consumer(["*"], kept)
    found = source.receive(10, 0.0)
    source.settle([found[0], found[3], found[4]])
    source.close()
    assert ids(read(File(path), kept)) == ["1", "2", "3", "4"]


def test_nothing_settled_nothing_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, range(3))
    kept = Kept()
    assert len(read(File(path), kept, settle=False)) == 3
    assert len(read(File(path), kept)) == 3


@pytest.mark.parametrize("how", ["shorter", "same beginning removed", "another inode"])
def test_a_truncated_or_replaced_file_is_read_from_its_beginning(tmp_path: Path, how: str) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, range(5))
    kept = Kept()
    assert len(read(File(path), kept)) == 5
    if how == "shorter":
        write_events(path, ["n0"])
    elif how == "same beginning removed":
        write_events(path, [f"n{number}" for number in range(20)])
    else:
        other = tmp_path / "other"
        write_events(other, range(6))
        other.rename(path)
    assert len(read(File(path), kept)) == {"shorter": 1, "another inode": 6}.get(how, 20)


def test_a_path_that_has_become_a_directory_is_refused(tmp_path: Path) -> None:
    """Its progress is kept under another name, and its topics are others."""
    source = File(tmp_path / "events")
    (tmp_path / "events").mkdir()
    with pytest.raises(ConfigurationError, match="has become a directory"):
        source.consumer(["events"], Kept())


def test_following_waits_for_the_newline_and_sees_what_is_added(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = event_line("a")
    path.write_text(line[:20])
    source = File(path, follow=True).consumer(["*"], Kept())
    assert source.receive(10, 0.0) == []
    with path.open("a") as file:
        file.write(line[20:])
    assert ids(list(source.receive(10, 5.0))) == ["a"]
    assert not source.exhausted
    source.close()


def test_following_a_rotated_file_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, ["a"])
    kept = Kept()
    source = File(path, follow=True).consumer(["*"], kept)
    first = source.receive(10, 0.0)
    path.rename(tmp_path / "events.jsonl.1")
    with (tmp_path / "events.jsonl.1").open("a") as file:
        file.write(event_line("b") + event_line("c").rstrip())
    write_events(path, ["d"])
    found: list[Delivery] = []

    def all_there() -> bool:
        received = source.receive(10, 0.05)
        source.settle(received)
        found.extend(received)
        return len(found) == 3

    source.settle(first)
    eventually(all_there)
    source.close()
    assert ids(found) == ["b", "c", "d"]
    assert read(File(path), kept) == []


def test_a_line_written_just_before_the_rotation_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, ["a"])
    read_bytes, rotated = os.read, tmp_path / "events.jsonl.1"

    def rotated_after_the_end(fd: int, count: int) -> bytes:
        found = read_bytes(fd, count)
        if not found and not rotated.exists():
            with path.open("a") as file:
                file.write(event_line("b"))
            path.rename(rotated)
            write_events(path, ["c"])
        return found

    source = File(path, follow=True).consumer(["*"], Kept())
    source.settle(source.receive(1, 0.0))
    monkeypatch.setattr(os, "read", rotated_after_the_end)
    for message_id in ("b", "c"):
        found = list(source.receive(1, 5.0))
        assert ids(found) == [message_id]
        source.settle(found)
    source.close()


@pytest.mark.parametrize("count", [1, 9], ids=["shorter", "longer by now"])
def test_following_a_truncated_file_starts_anew(tmp_path: Path, count: int) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, ["a", "b"])
    with path.open("a") as file:
        file.write(event_line("cut off")[:20])
    source = File(path, follow=True).consumer(["*"], Kept())
    found = list(source.receive(1, 0.0))
    write_events(path, [f"n{number}" for number in range(count)])

    def all_there() -> bool:
        received = source.receive(10, 0.05)
        source.settle([*found, *received])
        found.extend(received)
        return len(found) >= 2 + count

    eventually(all_there)
    assert ids(found) == ["a", "b", *(f"n{number}" for number in range(count))]
    source.close()


def test_a_file_of_a_directory_rewritten_to_the_same_length_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, ["a", "b"])
    kept = Kept()
    source = File(tmp_path, follow=True).consumer(["*"], kept)
    found = list(source.receive(10, 0.0))
    write_events(path, ["c", "d"])
    assert source.receive(10, 0.0) == []
    source.settle(found)
    assert ids(list(source.receive(10, 5.0))) == ["c", "d"]
    source.close()
    assert ids(read(File(tmp_path), kept)) == ["c", "d"]


def test_a_directory_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, each in (("b.jsonl", ["2"]), ("a.jsonl", ["0", "1"]), ("c.txt", ["no"])):
        write_events(tmp_path / name, each)
    kept = Kept()
    found = read(File(tmp_path), kept)
    assert ids(found) == ["0", "1", "2"]
    assert [row.topic for row in found] == ["a", "a", "b"]
    write_events(tmp_path / "0.jsonl", ["3"])
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(event_line("4"))
    assert ids(read(File(tmp_path), kept)) == ["3", "4"]


def test_files_of_other_topics_stay_unread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, name in enumerate(("invoices", "orders")):
        write_events(tmp_path / f"{name}.jsonl", [number])
    progress = Kept()
    source = File(tmp_path)
    for topics, wanted in ((["orders"], ["1"]), (["orders", "invoices"], ["0"])):
        consumer = source.consumer(topics, progress)
        deliveries = list(consumer.receive(10, 0.0))
        assert ids(deliveries) == wanted
        consumer.settle(deliveries)
        assert not consumer.receive(10, 0.0)
        consumer.close()
    assert caplog.text.count("does not read invoices.jsonl") == 1


def test_a_folder_in_a_directory_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").mkdir()
    write_events(tmp_path / "b.jsonl", ["1"])
    assert ids(read(File(tmp_path), Kept())) == ["1"]


def test_following_a_directory_finds_new_files(tmp_path: Path) -> None:
    write_events(tmp_path / "a.jsonl", ["0"])
    source = File(tmp_path, topic=TOPIC, follow=True).consumer(["*"], Kept())
    source.settle(source.receive(10, 0.0))
    assert source.receive(10, 0.0) == []
    write_events(tmp_path / "b.jsonl", ["1"])
    assert ids(list(source.receive(10, 5.0))) == ["1"]
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write(event_line("2"))
    assert ids(list(source.receive(10, 5.0))) == ["2"]
    source.close()


def test_a_file_moved_away_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    write_events(tmp_path / "a.jsonl", range(3))
    before = _open_files()
    source = File(tmp_path, topic=TOPIC, follow=True).consumer(["*"], Kept())
    found = list(source.receive(1, 0.0))
    (tmp_path / "a.jsonl").rename(tmp_path / "a.done")
    found += source.receive(10, 0.0)
    assert ids(found) == ["0", "1", "2"]
    source.settle(found)
    assert source.receive(10, 0.0) == []
    assert _open_files() == before
    source.close()


def test_another_process_takes_over_where_the_first_came_to(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, range(4))
    kept = Kept()
    kept.held_by_another = True
    source = File(path).consumer(["*"], kept)
    assert source.receive(10, 0.0) == []
    assert not source.exhausted
    other = Kept()
    read(File(path), other)
    kept.state, kept.held_by_another = other.state, False
    assert eventually(lambda: source.receive(10, 0.1) or source.exhausted) is True
    source.close()


def test_a_reader_that_lost_its_lease_starts_from_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.brokers.file._SAVE_S", 0.0)
    path = tmp_path / "events.jsonl"
    write_events(path, range(4))
    kept = Kept()
    source = File(path).consumer(["*"], kept)
    first = source.receive(2, 0.0)
    kept.lost = True
    source.settle(first)
    kept.lost = False
    assert ids(list(source.receive(10, 0.0))) == ["0", "1", "2", "3"]
    source.settle(first)
    source.close()
    assert len(read(File(path), kept)) == 4


def test_a_reader_whose_lines_take_long_keeps_its_lease(tmp_path: Path) -> None:
    """Nothing is received or settled meanwhile; another process would read the same lines."""
    path = tmp_path / "events.jsonl"
    write_events(path, range(3))
    kept = Kept()
    kept.lease_s = 0.3
    source = File(path).consumer(["*"], kept)
    found = source.receive(10, 0.0)
    assert source.tend_every_s == pytest.approx(0.1)
    assert kept.acquired == 1

    def is_renewed() -> bool:
        source.tend(found)
        return kept.acquired == 3

    eventually(is_renewed)
    source.close()
    assert File("-", topic="t").tend_every_s is None


def test_lines_wait_while_progress_cannot_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.brokers.file._SAVE_S", 0.0)
    path = tmp_path / "events.jsonl"
    write_events(path, range(3))
    kept = Kept()
    source = File(path).consumer(["*"], kept)
    first = source.receive(1, 0.0)
    kept.away = True
    with pytest.raises(StoreUnavailable):
        source.settle(first)
    with pytest.raises(StoreUnavailable):
        source.receive(10, 0.0)
    kept.away = False
    assert ids(list(source.receive(10, 0.0))) == ["1", "2"]
    source.close()


def redelivered(deliveries: list[Delivery]) -> list[str | None]:
    return ids([delivery for delivery in deliveries if delivery.redelivered])


def test_lines_that_may_have_killed_the_process_are_marked(tmp_path: Path) -> None:
    """Those from the saved position to the last line handed out, and no other; so they are until they are settled."""
    path = tmp_path / "events.jsonl"
    write_events(path, range(9))
    kept = Kept()
    dies = File(path, follow=True).consumer(["*"], kept)
    deliveries = list(dies.receive(4, 0.0))
    assert redelivered(deliveries) == []
    dies.settle(deliveries[:1])

    for count in (1, 2):
        source = File(path, follow=True).consumer(["*"], kept)
        deliveries = list(source.receive(count, 0.0))
        assert redelivered(deliveries) == ["0", "1"][:count]
    source = File(path, follow=True).consumer(["*"], kept)
    deliveries = list(source.receive(9, 0.0))
    assert redelivered(deliveries) == ["0", "1", "2", "3"]
    source.settle(deliveries)
    source.close()
    with path.open("a") as file:
        file.write(event_line(9))
    assert redelivered(read(File(path), kept)) == []


def test_nothing_is_handed_out_before_it_could_be_marked(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, range(3))
    kept = Kept()
    source = File(path).consumer(["*"], kept)
    kept.away = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            source.receive(10, 0.0)
    kept.away = False
    assert ids(list(source.receive(10, 0.0))) == ["0", "1", "2"]
    again = File(path).consumer(["*"], kept)
    assert redelivered(list(again.receive(10, 0.0))) == ["0", "1", "2"]


def test_a_busy_reader_does_not_save_for_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("txbox.brokers.file._SAVE_S", 3600.0)
    path = tmp_path / "events.jsonl"
    write_events(path, range(1000))
    kept = Kept()
    source = File(path).consumer(["*"], kept)
    while deliveries := source.receive(1, 0.0):
        source.settle(deliveries)
    assert kept.saves < 20
    source.close()


def test_what_is_no_regular_file_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("/dev/zero")
    (tmp_path / "c.jsonl").symlink_to("/dev/null")
    write_events(tmp_path / "other", ["1"])
    (tmp_path / "d.jsonl").symlink_to(tmp_path / "other")
    (tmp_path / "e.jsonl").symlink_to(tmp_path / "nowhere")
    write_events(tmp_path / "f.jsonl", ["2"])
    source = File(tmp_path, follow=True).consumer(["*"], Kept())
    deliveries = list(source.receive(10, 0.0))
    assert ids(deliveries) == ["1", "2"]
    source.settle(deliveries)
    assert source.receive(10, 0.0) == []
    source.close()
    for name in ("a", "b", "c"):
        assert caplog.text.count(f"does not read {name}.jsonl: it is not a regular file") == 1
    for name in ("a", "b", "c"):
        with pytest.raises(ConfigurationError, match="neither a regular file nor a directory"):
            File(tmp_path / f"{name}.jsonl").consumer(["*"], Kept())


@pytest.mark.parametrize("kind", ["FIFO", "device"])
def test_a_file_replaced_by_something_else_is_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, ["1"])
    source = File(path, follow=True).consumer(["*"], Kept())
    source.settle(source.receive(10, 0.0))
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    for _ in range(4):
        assert source.receive(10, 0.0) == []
    path.unlink()
    write_events(path, ["2"])
    assert ids(list(source.receive(10, 5.0))) == ["2"]
    source.close()


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_no_file_stays_open(tmp_path: Path) -> None:
    for number in range(50):
        write_events(tmp_path / f"{number:02}.jsonl", [number])
    before = _open_files()
    source = File(tmp_path, topic=TOPIC, follow=True).consumer(["*"], Kept())
    while received := source.receive(10, 0.0):
        source.settle(received)
    assert _open_files() <= before + 1
    source.close()
    assert _open_files() == before


def test_a_missing_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        File(tmp_path / "none.jsonl").consumer(["*"], Kept())
    with pytest.raises(ConfigurationError, match="topic="):
        File("-")


# -- in a worker ------------------------------------------------------------------------------


def test_a_worker_reads_a_file_once(shop: Shop, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    write_events(path, range(30))
    with path.open("a") as file:
        file.write("not json\n\n" + event_line(0))
    shop.handler(concurrency=2)
    shop.app.consume(File(path))

    assert worker(shop.app, once=True).run() == 0
    assert worker(shop.app, once=True).run() == 0

    assert shop.effects() == 30
    assert len(shop.calls) == 30
    ((reason, seen),) = quarantined(shop.raw)
    assert "orders.jsonl" in reason
    assert seen == 1
    ((name, state, token),) = shop.raw.rows("SELECT name, state, token FROM txbox_job")
    name = name.decode() if isinstance(name, bytes) else name
    assert name == f"file:orders:{path}"
    assert json.loads(state)["orders.jsonl"][1] == path.stat().st_size
    assert token is None


def test_a_worker_follows_a_file(shop: Shop, tmp_path: Path) -> None:
    path = tmp_path / "orders.jsonl"
    write_events(path, range(3))
    shop.handler()
    shop.app.consume(File(path, follow=True))
    with running(worker(shop.app)) as codes:
        eventually(lambda: shop.effects() == 3)
        with path.open("a") as file:
            file.write(event_line(3))
        eventually(lambda: shop.effects() == 4)
    assert codes == [0]


@pytest.mark.parametrize("grows", [True, False])
def test_a_database_that_lost_its_last_transactions_gets_them_again(
    shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, grows: bool
) -> None:
    """A running worker does not write its newer position over the older one there, nor waits for a new line."""
    path = tmp_path / "orders.jsonl"
    write_events(path, range(3))
    shop.handler()
    shop.app.consume(File(path, follow=True))

    def saved(count: int) -> bool:
        return shop.effects() == count and state() not in (None, older)

    def state() -> Any:
        return shop.raw.value("SELECT state FROM txbox_job WHERE name = ?", (name,))

    older, name = None, as_id(shop.raw, f"file:orders:{path}")
    with running(worker(shop.app)) as codes:
        eventually(lambda: saved(3), "the first three")
        older = state()
        with path.open("a") as file:
            file.writelines(event_line(number) for number in range(3, 9))
        eventually(lambda: saved(9), "all nine")
        lost = [as_id(shop.raw, message_id) for message_id in dict.fromkeys(shop.calls[3:])]
        marks = ", ".join("?" * len(lost))
        shop.raw.execute("BEGIN")
        for table in ("effect", "txbox_inbox"):
            shop.raw.execute(f"DELETE FROM {table} WHERE message_id IN ({marks})", lost)
        shop.raw.execute("UPDATE txbox_job SET state = ? WHERE name = ?", (older, name))
        shop.raw.execute("COMMIT")
        if grows:
            with path.open("a") as file:
                file.write(event_line(9))
        eventually(lambda: shop.effects() == 9 + grows, "what was lost")
    assert codes == [0]
    assert "goes back to the progress that the database has" in caplog.text


def test_what_was_lost_since_the_progress_was_saved_comes_again(
    postgresql_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved position survives: only the history shows that something after it may be lost."""
    path, backup = tmp_path / "orders.jsonl", Backup(postgresql_url)
    write_events(path, range(3))
    try:
        with opened(postgresql_url) as shop:
            shop.handler()
            shop.app.consume(File(path, follow=True))
            with running(worker(shop.app)) as codes:
                eventually(lambda: len(shop.calls) == 3)
                monkeypatch.setattr("txbox.brokers.file._SAVE_S", 3600.0)
                backup.take()
                with path.open("a") as file:
                    file.writelines(event_line(number) for number in range(3, 9))
                eventually(lambda: len(shop.calls) >= 9)
                backup.restore()
                with Raw(postgresql_url) as raw:
                    eventually(lambda: effects(raw) == 9, "what was lost")
            assert codes == [0]
    finally:
        backup.close()


def test_a_topic_that_no_handler_consumes_is_refused(
    shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "invoices.jsonl"
    write_events(path, range(3))
    shop.handler()
    shop.app.consume(File(path))
    assert worker(shop.app).run() == 2
    assert "'invoices'" in caplog.text


def test_a_missing_file_exits_with_status_2(
    shop: Shop, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shop.handler()
    shop.app.consume(File(tmp_path / "orders.jsonl"))
    assert worker(shop.app).run() == 2
    assert "does not exist" in caplog.text


def test_what_standard_input_brought_at_once_does_not_wait_for_more() -> None:
    standard_input, (reader, writer) = os.dup(0), os.pipe()
    os.dup2(reader, 0)
    try:
        source = File("-", topic=TOPIC).consumer(["*"], Kept())
        os.write(writer, "".join(map(event_line, range(3))).encode())
        found = [ids(list(source.receive(1, 0.05))) for _ in range(4)]
        assert found == [["0"], ["1"], ["2"], []]
        os.close(writer)
        assert source.receive(1, DEADLINE_S) == []
        assert source.exhausted
        source.close()
    finally:
        os.dup2(standard_input, 0)
        os.close(standard_input)
        os.close(reader)


def test_standard_input(sqlite_url: str, raw: Any) -> None:
    script = f"""
import sys
from txbox import App
from txbox.brokers.file import File
from txbox.errors import StoreUnavailable
from txbox.worker import Worker
app = App({sqlite_url!r})
@app.handler({TOPIC!r}, consumer={CONSUMER!r})
def handle(message, tx): print(message.id, flush=True)
app.consume(File("-", topic={TOPIC!r}))
sys.exit(Worker(app, once=True).run())
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(event_line("a").encode() + event_line("b").encode()[:30])
        process.stdin.flush()
        assert process.stdout.readline() == b"/test a\n"
        process.stdin.write(event_line("b").encode()[30:].strip())
        process.stdin.close()
        assert process.stdout.readline() == b"/test b\n"
        assert process.wait(DEADLINE_S) == 0
    assert raw(sqlite_url).value("SELECT count(*) FROM txbox_job WHERE name LIKE 'file:%'") == 0
