"""A rehearsed deploy: two versions of an App run the same messages, and what their handlers did is compared.

Source: docs/decisions/0069-rehearsed-deploys.md
"""

from __future__ import annotations

import json
import os
import re
import select
import statistics
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import IO, Any, Self, cast

from txbox.admin.rehearsal import Record, Rehearsals, recorded
from txbox.errors import ConfigurationError
from txbox.policy import HIDDEN
from txbox.text import counted

#: How the two processes talk; both must speak the same.
_PROTOCOL = 1
# a handler may have 30 s, and is tried three times
_ANSWER_S = 150.0
_LINES = 20
# a difference counts if it is there in each of so many more runs of both
_CONFIRMED = 2
# what differs between runs of the same code in so many of a handler's messages says nothing about the new code
_NOISY, _NOISY_SHARE = 2, 0.05
# below this, times say little
_TIMED_MIN = 20
_EXAMPLES = 5

ADDED, REMOVED, NUMBER = "(only new)", "(only running)", "(number)"
Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A message that both run."""

    consumer: str
    message_id: str
    topic: str
    type: str | None = None

    @property
    def handler(self) -> str:
        """What its handler is called in a report."""
        return " ".join(filter(None, (self.consumer, self.topic, self.type)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of one message: `Record`, as it comes from another process.

    Attributes:
        shown: the document without what is redacted; None unless values are shown.
    """

    skipped: str | None = None
    document: dict[str, Any] = field(default_factory=dict[str, Any])
    shown: dict[str, Any] | None = None
    complete: bool = False
    handler_s: float = 0.0

    @classmethod
    def of(cls, record: Record, shown: dict[str, Any] | None) -> Reply:
        return cls(
            skipped=record.skipped,
            document=record.document(),
            shown=shown,
            complete=record.complete,
            handler_s=record.handler_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What the new code does differently, in how many messages of a handler.

    Attributes:
        kind: "outcome", "result", "staged", "rows", "statements" or "calls".
        what: where; never a value.
        messages: the first of them.
        running, new: the values in the first one, redacted; None where values are not shown.
    """

    handler: str
    kind: str
    what: str
    count: int
    messages: tuple[str, ...]
    running: str | None = None
    new: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerComparison:
    """The messages of one handler.

    Attributes:
        failing: those that fail in both, by outcome: only that is compared.
        ignored: what two runs of the running code differ in.
        running_ms, new_ms: medians of the handler's time.
        pace: "slower" or "faster" if the middle halves of their times do not overlap.
    """

    handler: str
    messages: int
    differing: int
    failing: Mapping[str, int]
    ignored: tuple[str, ...]
    running_ms: float
    new_ms: float
    pace: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What a rehearsed deploy found; nothing of it was committed.

    Attributes:
        compared: messages that both ran, or that only the running code could run.
        skipped: the others, by reason.
    """

    compared: int
    differing: int
    failing: int
    skipped: Mapping[str, int]
    differences: tuple[Difference, ...]
    handlers: tuple[HandlerComparison, ...]
    duration_s: float


Run = Callable[[str, str], Reply]


# -- differences ------------------------------------------------------------------------------


def differences(old: Any, new: Any, path: Path = ()) -> Iterator[Path]:
    """Where two documents differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        before, after = cast("dict[str, object]", old), cast("dict[str, object]", new)
        for name in {**before, **after}:
            if name not in after:
                yield (*path, name, REMOVED)
            elif name not in before:
                yield (*path, name, ADDED)
            else:
                yield from differences(before[name], after[name], (*path, name))
    elif isinstance(old, list) and isinstance(new, list):
        befores, afters = cast("list[object]", old), cast("list[object]", new)
        if len(befores) != len(afters):
            yield (*path, NUMBER)
        else:
            for index, pair in enumerate(zip(befores, afters, strict=True)):
                yield from differences(*pair, (*path, index))
    elif type(cast("object", old)) is not type(cast("object", new)) or old != new:
        yield path


def between(old: Reply, new: Reply) -> set[Path]:
    """Where two runs differ. By which statements rows were written is not compared where all of these are known."""
    known = old.complete and new.complete
    return {
        path
        for name in old.document.keys() & new.document.keys()
        for path in differences(old.document[name], new.document[name], (name,))
        if not (known and name == "statements" and _WRITES_ROWS.match(str(path[1])))
    }


_WRITES_ROWS = re.compile(r"\s*(?:insert|update|delete|merge|replace|with|copy)\b", re.IGNORECASE)


def _base(path: Path) -> Path:
    return path[:-1] if path[-1] in (ADDED, REMOVED, NUMBER) else path


def _general(path: Path) -> Path:
    """The path in every message: without positions."""
    return tuple("[]" if isinstance(part, int) else part for part in path)


def _without(paths: Iterable[Path], noise: Iterable[Path]) -> set[Path]:
    """The paths that are not at or below a noisy one."""
    noisy = set(map(_base, noise))
    return {
        path for path in paths if not any(path[:end] in noisy for end in range(1, len(path) + 1))
    }


def _named(path: Path) -> str:
    """A path for people, without its kind."""
    kind, *parts = path
    if kind == "statements" and len(parts) > 1 and parts[1] == "[]":
        statement, _, *value = parts
        return f"{statement}: value {'.'.join(map(str, value))}"
    first, rest = (str(parts[0]), parts[1:]) if parts else ("", [])
    if kind == "rows" and rest[:1] == ["rows"]:
        rest = rest[2:] or rest[1:]
    text = ".".join(map(str, rest)).replace(".(", " (")
    return f"{first} {text}".strip()


def _value(document: Any, path: Path) -> Any:
    for part in _base(path):
        if isinstance(document, dict) and part in document:
            document = cast("dict[object, object]", document)[part]
        elif isinstance(document, list) and isinstance(part, int):
            document = cast("list[object]", document)[part]
        else:
            return None
        if document == HIDDEN:
            break
    if path[-1] == NUMBER:
        return len(cast("list[object]", document)) if isinstance(document, list) else document
    return document


@dataclass(slots=True)
class _Case:
    """What was seen of one message."""

    subject: Subject
    replies: tuple[Reply, Reply]
    real: set[Path]
    noise: set[Path]


def compare(
    subjects: Sequence[Subject],
    running: Run,
    new: Run,
    *,
    after_each: Callable[[int], None] = lambda _done: None,
) -> Comparison:
    """Run each message through the running code, the new code, and the running code again.

    What the two runs of the running code differ in (ids, times, what live traffic changes) is not compared. The new
    code runs between them, so that a clock which has not moved for the two has not moved for it either. What then
    differs must do so in two more runs of both.

    Raises:
        ConfigurationError: the new code uses another database.
    """
    started = time.monotonic()
    skipped, cases = Counter[str](), list[_Case]()
    times: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for done, subject in enumerate(subjects, 1):
        key = subject.consumer, subject.message_id
        first, other, second = running(*key), new(*key), running(*key)
        for reply in (first, second):
            if reply.skipped is not None:
                skipped[reply.skipped] += 1
                break
        else:
            case = _case(subject, first, other, second, running, new)
            if case is None:
                skipped["locked"] += 1
            else:
                cases.append(case)
                if first.document["outcome"] == "processed" == other.document.get("outcome"):
                    times[subject.handler][0].extend((first.handler_s, second.handler_s))
                    times[subject.handler][1].append(other.handler_s)
        after_each(done)
    handlers, every = list[HandlerComparison](), list[Difference]()
    for name in sorted({case.subject.handler for case in cases}):
        report, some = _of_handler(
            name, [case for case in cases if case.subject.handler == name], *times[name]
        )
        handlers.append(report)
        every += some
    return Comparison(
        compared=len(cases),
        differing=sum(handler.differing for handler in handlers),
        failing=sum(sum(handler.failing.values()) for handler in handlers),
        skipped=dict(skipped),
        differences=tuple(every),
        handlers=tuple(handlers),
        duration_s=time.monotonic() - started,
    )


def _case(
    subject: Subject, first: Reply, other: Reply, second: Reply, running: Run, new: Run
) -> _Case | None:
    """What differs in one message; None if it could not be run."""
    if other.skipped == "gone":
        raise ConfigurationError(
            f"The new code finds no message {subject.message_id!r} of {subject.consumer!r}: both must use the same "
            "database."
        )
    if other.skipped == "locked":
        return None
    if other.skipped is not None:
        other = Reply(
            document={"outcome": other.skipped},
            shown=None if first.shown is None else {"outcome": other.skipped},
        )
    real, noise = between(first, other), between(first, second)
    key = subject.consumer, subject.message_id
    for _ in range(_CONFIRMED):
        real = _without(real, noise)
        if not real:
            break
        again, others = running(*key), new(*key)
        if again.skipped is None:
            noise |= between(first, again)
        if others.skipped is None:
            real &= between(first, others)
    return _Case(subject, (first, other), _without(real, noise), noise)


def _of_handler(
    name: str, cases: Sequence[_Case], old_s: Sequence[float], new_s: Sequence[float]
) -> tuple[HandlerComparison, list[Difference]]:
    noisy = Counter(
        path for case in cases for path in {_general(_base(path)) for path in case.noise}
    )
    least = max(_NOISY, _NOISY_SHARE * len(cases))
    ignored = {path for path, count in noisy.items() if count >= least}
    groups: dict[tuple[str, str], list[tuple[_Case, Path]]] = defaultdict(list)
    differing = 0
    failing = Counter[str]()
    for case in cases:
        kinds = dict[tuple[str, str], Path]()
        for path in sorted(case.real, key=str):
            general = _general(path)
            if _without([general], ignored):
                outcomes = [str(reply.document["outcome"]) for reply in case.replies]
                what = " → ".join(outcomes) if general[0] == "outcome" else _named(general)
                kinds.setdefault((str(general[0]), what), path)
        for key, path in kinds.items():
            groups[key].append((case, path))
        differing += bool(kinds)
        outcome = str(case.replies[0].document["outcome"])
        if outcome != "processed" and not kinds:
            failing[outcome] += 1
    rows = [_difference(name, kind, what, group) for (kind, what), group in sorted(groups.items())]
    report = HandlerComparison(
        handler=name,
        messages=len(cases),
        differing=differing,
        failing=dict(failing),
        ignored=tuple(sorted({f"{path[0]} {_named(path)}" for path in ignored})),
        running_ms=_median_ms(old_s),
        new_ms=_median_ms(new_s),
        pace=_pace(old_s, new_s),
    )
    return report, rows


def _difference(
    handler: str, kind: str, what: str, group: Sequence[tuple[_Case, Path]]
) -> Difference:
    case, path = group[0]
    values: list[str | None] = [None, None]
    if case.replies[0].shown is not None:
        shown = [_value(reply.shown, path) for reply in case.replies]
        # what one side hides, the other one must not show
        hidden = any(HIDDEN in json.dumps(value) for value in shown)
        values = [HIDDEN if hidden else json.dumps(value, ensure_ascii=False) for value in shown]
    return Difference(
        handler=handler,
        kind=kind,
        what=what,
        count=len(group),
        messages=tuple(case.subject.message_id for case, _ in group[:_EXAMPLES]),
        running=values[0],
        new=values[1],
    )


def _median_ms(times: Sequence[float]) -> float:
    return round(statistics.median(times) * 1000, 3) if times else 0.0


def _pace(old: Sequence[float], new: Sequence[float]) -> str | None:
    if len(new) < _TIMED_MIN:
        return None
    (old_low, _, old_high), (low, _, high) = statistics.quantiles(old), statistics.quantiles(new)
    return "slower" if low > old_high else "faster" if high < old_low else None


# -- the two sides ----------------------------------------------------------------------------


def answer(
    admin: Rehearsals, requests: Iterable[str], replies: IO[str], *, shown: bool = False
) -> None:
    """Rehearse what is asked for, a line of JSON each: what runs in the process of a side.

    Args:
        shown: send along what people may see of it.
    """
    _send(replies, {"protocol": _PROTOCOL})
    redact = admin.store.columns.redact
    for line in requests:
        record = recorded(admin, *json.loads(line))
        reply = Reply.of(record, record.shown(redact) if shown else None)
        _send(replies, {each.name: getattr(reply, each.name) for each in fields(reply)})


def _send(stream: IO[str], value: Any) -> None:
    stream.write(json.dumps(value) + "\n")
    stream.flush()


class Side:
    """One version of the App, in a process of its own: two modules of one name do not fit into one process.

    Args:
        name: the App, for people.
        command: starts `answer` in its process.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, consumer: str, message_id: str) -> Reply:
        process = self._process or self._start()
        line = ""
        # a process that has ended has no answer
        with suppress(BrokenPipeError):
            assert process.stdin is not None
            _send(process.stdin, [consumer, message_id])
            line = self._line(process, _ANSWER_S)
        if line:
            return Reply(**json.loads(line))
        ended = self._end()
        outcome = (
            f"no answer in {_ANSWER_S:g} s"
            if ended is None
            else f"its process ended with status {ended}"
        )
        return Reply(document={"outcome": outcome}, shown={"outcome": outcome})

    def _start(self) -> subprocess.Popen[str]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
        )
        line = self._line(process, _ANSWER_S)
        protocol = json.loads(line).get("protocol") if line.startswith("{") else None
        if protocol != _PROTOCOL:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1)
            said = self._said()
            self._end()
            raise ConfigurationError(
                f"{self._name} cannot be rehearsed: "
                + (said or "its txbox is of a release that cannot compare with this one.")
            )
        return process

    def _line(self, process: subprocess.Popen[str], timeout_s: float) -> str:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], timeout_s)
        return process.stdout.readline() if ready else ""

    def _said(self) -> str:
        """The last line of its standard error."""
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").splitlines()[-_LINES:]
        return lines[-1].removeprefix("txbox: ") if lines else ""

    def _end(self) -> int | None:
        """End the process; returns its exit status, if it had ended by itself."""
        process, self._process = self._process, None
        if process is None:
            return None
        for stream in (process.stdin, process.stdout):
            # what was not sent is of no interest
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        ended: int | None = None
        try:
            ended = process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None
        return ended


def environment_of(directory: str | None) -> dict[str, str]:
    """The environment of a side whose modules are in this directory."""
    environment = dict(os.environ)
    if directory is not None:
        paths = [directory, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def nothing_compared(comparison: Comparison) -> str | None:
    """Why a comparison without differences says nothing of a handler, or of any; None if it says something."""
    for handler in comparison.handlers:
        if handler.failing and sum(handler.failing.values()) == handler.messages:
            outcome = max(handler.failing, key=lambda name: handler.failing[name])
            return (
                f"{handler.handler}: {counted(handler.messages)} failed in both, as {outcome}, so nothing else was "
                "compared. Its effects may be in the way: rehearse on a copy of the database from before."
            )
    return None if comparison.compared else "None of the messages could be run."
