"""CloudEvents JSON Lines from a file, a directory or standard input; progress is kept in the database."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import select
import stat
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from txbox.brokers.base import Consumer, Context, Delivery, Progress, Source
from txbox.brokers.envelope import EVENT, FILE
from txbox.errors import ConfigurationError

_log = logging.getLogger("txbox")

_RECEIVED_BYTES = 8 * 1024 * 1024
_SAVE_S = 0.5
_POLL_S = 0.1
_WAIT_FOR_LEASE_S = 0.5
#: How much of an overlong line is kept.
RAW_KEPT_BYTES = 64 * 1024
_CHUNK_BYTES = 256 * 1024
_HEAD_BYTES = 256
# what is saved before lines are handed out covers at most so much more, so that it is not saved each time
_AHEAD_BYTES = 64 * 1024


class File(Source):
    """Reads CloudEvents JSON Lines: one structured event per line.

    Args:
        path: a regular file; a directory, whose regular files are read in the order of their names; or "-" for
            standard input.
        topic: the topic of its messages; by default the file's name without its last suffix. Files of a directory
            are then read if their topic is asked for.
        follow: keep reading as the file grows or is replaced, or files are added to the directory.
        name: what the progress is kept under, instead of the path. Two services that read the same
            file and share a database need different names.
        pattern: which files of a directory are read.
        line_bytes: a longer line is quarantined, with only its beginning.

    A line that is not a CloudEvent is quarantined. With `follow`, a last line without a newline is still
    being written, and waits for it.

    Guarantee: progress moves past a line only after it and all lines before it are settled. After a
    crash, what was settled in the last half second is read again and is a duplicate; so is what a database lost in a
    failover or restore. Lines that the process may have died of are marked as redelivered. One process reads
    at a time; another takes over seconds after it is gone. A file that was truncated or replaced is
    read from its beginning; what a crash leaves unread of the old one is read only from a directory
    that keeps it. Standard input keeps no progress, so a line that kills its process is not counted.
    """

    rewinds = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        topic: str | None = None,
        follow: bool = False,
        name: str | None = None,
        pattern: str = "*.jsonl",
        line_bytes: int = 16 * 1024 * 1024,
    ) -> None:
        stdin = os.fspath(path) == "-"
        if stdin and topic is None:
            raise ConfigurationError('File("-") has no name to derive a topic from: pass topic=.')
        if line_bytes < 1:
            raise ConfigurationError(f"line_bytes is {line_bytes}: it must be 1 or more.")
        self.path = Path(path).absolute()
        self._is_directory = self.path.is_dir()
        self._consumed = partial(
            FileConsumer, self, None if stdin else self.path,
            topic=topic, follow=follow and not stdin, pattern=pattern, line_bytes=line_bytes,
        )  # fmt: skip
        if topic or not self._is_directory:
            self.topics = (topic or self.path.stem,)
        kept_under = name or ("-" if stdin else str(self.path))
        self.name = f"file:{','.join(self.topics or '*')}:{kept_under}"

    def keeps_order(self, topic: str) -> bool:
        """A file is read from beginning to end, by one process at a time."""
        return True

    def consumer(self, topics: Sequence[str], context: Context) -> FileConsumer:
        if self.path.is_dir() is not self._is_directory and self.path.exists():
            raise ConfigurationError(
                f"{self.path} has become a directory, or was one, since File(…) was made: start again."
            )
        return self._consumed(topics, context.progress)


class FileConsumer(Consumer):
    """Reads the files of a File, while it has the lease of their progress.

    Args:
        path: None for standard input.
    """

    def __init__(
        self,
        source: File,
        path: Path | None,
        topics: Sequence[str],
        progress: Progress,
        *,
        topic: str | None,
        follow: bool,
        pattern: str,
        line_bytes: int,
    ) -> None:
        super().__init__(source)
        self._path = path
        self._topic = topic
        self._follow = follow
        self._pattern = pattern
        self._line_bytes = line_bytes
        self._asked = frozenset(topics)
        # paths that are not read
        self._others: set[Path] = set()
        self._progress: Progress | None = None
        self._lease_at = self._save_at = 0.0
        self._cursors: dict[str, Cursor] = {}
        self._saved: dict[str, list[object]] = {}
        # read, but not handed out yet
        self._ready: list[Delivery] = []
        self._holding = self._ended = self._dirty = False
        if path is None:
            self._cursors["-"] = Cursor(None, topic or "-", line_bytes, 0)
            self._holding = True
            return
        if not path.exists():
            raise ConfigurationError(f"The file {path} does not exist: check the path of File(…).")
        if not (path.is_file() or path.is_dir()):
            raise ConfigurationError(
                f"{path} is neither a regular file nor a directory: pipe what it brings into standard input, and "
                'read File("-", topic=…).'
            )
        if not os.access(path, os.R_OK):
            raise ConfigurationError(f"The file {path} cannot be read: check its permissions.")
        self._progress = progress
        self.tend_every_s = progress.lease_s / 3

    @property
    def exhausted(self) -> bool:
        return self._ended and self._holding

    def receive(self, messages_max: int, wait_s: float) -> Sequence[Delivery]:
        deadline = time.monotonic() + wait_s
        while True:
            if self._leased() and self._save():
                self._read(messages_max)
                # before a line can kill this process; what is read stays ready if that fails
                if self._ready and self._save(now=any(map(_is_unsaved, self._cursors.values()))):
                    ready, self._ready = self._ready, []
                    return ready
            left_s = deadline - time.monotonic()
            if self.exhausted or left_s <= 0:
                return []
            if self._path is None:
                select.select([0], [], [], left_s)
            else:
                time.sleep(min(left_s, _POLL_S if self._holding else _WAIT_FOR_LEASE_S))

    def tend(self, deliveries: Sequence[Delivery]) -> None:
        self._leased()

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            cursor, line = delivery.tag
            cursor.settle(line)
        self._dirty = True
        if self._leased():
            self._save()

    def close(self) -> None:
        try:
            if self._progress is not None and self._holding:
                self._save(now=True)
                self._progress.release()
        finally:
            self._drop()

    # -- the lease and what it protects -------------------------------------------------------

    def _leased(self) -> bool:
        """Take or renew the lease when due. A new holder continues where the last one stopped."""
        progress, now = self._progress, time.monotonic()
        if progress is None or now < self._lease_at:
            return self._holding
        if not progress.acquire():
            self._drop()
            self._lease_at = now + _WAIT_FOR_LEASE_S
            return False
        if not self._holding:
            state = progress.load()
            self._saved = json.loads(state) if state else {}
            self._holding = True
        self._lease_at = now + progress.lease_s / 3
        return True

    def _drop(self) -> None:
        for cursor in self._cursors.values():
            cursor.close()
        self._cursors = {}
        self._saved = {}
        self._ready = []
        self._holding = self._ended = self._dirty = False

    def _save(self, *, now: bool = False) -> bool:
        """Save the progress if that is due; returns False if the lease turns out to be lost."""
        progress = self._progress
        if progress is None or not (now or (self._dirty and time.monotonic() >= self._save_at)):
            return True
        for name, cursor in self._cursors.items():
            self._saved[name] = cursor.state()
        if not progress.save(json.dumps(self._saved)):
            self._drop()
            self._lease_at = 0.0
            return False
        for cursor in self._cursors.values():
            cursor.saved_reach = cursor.reach
        self._dirty = False
        self._save_at = time.monotonic() + _SAVE_S
        return True

    # -- reading ------------------------------------------------------------------------------

    def _read(self, messages_max: int) -> None:
        """Fill what is ready."""
        # saved just now: the next lines would have to wait for another save
        ahead = time.monotonic() < self._save_at
        size = sum(delivery.size_bytes for delivery in self._ready)
        for cursor in self._current():
            while len(self._ready) < messages_max and size < _RECEIVED_BYTES:
                line = cursor.next_line(final=not self._follow)
                if line is None:
                    break
                size += len(line[1])
                cursor.extend_reach(line[0], ahead=ahead)
                self._ready.append(self._delivery(cursor, *line))
            else:
                return
            self._at_end(cursor)
        if self._path is None:
            self._ended = self._cursors["-"].ended
        else:
            # a partly filled batch only means that some file has ended
            self._ended = not self._ready and not self._follow

    def _current(self) -> list[Cursor]:
        """Return the open streams: files in reading order, new ones too, then what is left of files that are gone."""
        if self._path is None:
            return list(self._cursors.values())
        paths = [self._path]
        if self._path.is_dir():
            paths = sorted(filter(self._is_asked_for, self._path.glob(self._pattern)))
        for path in paths:
            cursor = self._cursors.get(path.name)
            if cursor is None:
                opened = self._opened(path)
                if opened is not None:
                    self._cursors[path.name] = opened
            elif cursor.fd < 0:
                self._reopen(path, cursor)
        names = dict.fromkeys((*(path.name for path in paths), *self._cursors))
        streams = (self._cursors.get(name) for name in names)
        return [stream for stream in streams if stream is not None and stream.fd >= 0]

    def _is_asked_for(self, path: Path) -> bool:
        """Whether a path of the directory is a file to read. One without a handler waits for a release that has it."""
        if path.is_dir():
            return False
        if not (self._topic or path.stem in self._asked or "*" in self._asked):
            self._pass_over(path, f"it was not asked for topic {path.stem!r}")
            return False
        return True

    def _pass_over(self, path: Path, why: str) -> None:
        if path not in self._others:
            self._others.add(path)
            _log.warning("%s does not read %s: %s.", self.name, path.name, why)

    def _opened(self, path: Path) -> Cursor | None:
        if path.exists() and not path.is_file():
            # opening a FIFO waits for a writer, and opening a device may do anything
            self._pass_over(path, "it is not a regular file")
            return None
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            # moved away just now; if it comes back, it is a new file
            return None
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            # replaced between the two
            os.close(fd)
            return None
        cursor = Cursor(path, self._topic or path.stem, self._line_bytes, fd, inode=found.st_ino)
        if saved := self._saved.get(path.name):
            cursor.resume(saved, found.st_size)
        return cursor

    def _reopen(self, path: Path, cursor: Cursor) -> None:
        """Check a file that was read to its end and closed."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return
        if (found.st_ino, found.st_size) == (cursor.inode, cursor.front):
            return
        self._saved[path.name] = cursor.state()
        opened = self._opened(path)
        if opened is not None:
            self._cursors[path.name] = opened

    def _at_end(self, cursor: Cursor) -> None:
        """At the end of a stream: close it, or follow its path to a new file."""
        if self._path is None or cursor.path is None or cursor.waiting:
            return
        if not cursor.rewritten:
            if self._path.is_dir() and not cursor.buffer and cursor.cut is None:
                # a directory may hold more files than a process may open
                cursor.close()
                return
            if not self._follow:
                return
            try:
                found = cursor.path.stat()
            except FileNotFoundError:
                return
            replaced = found.st_ino != cursor.inode
            if replaced and not cursor.last:
                # read on: it may have grown just before, and what it ends with is a line
                cursor.last = True
                return
            if not replaced and found.st_size >= cursor.start + len(cursor.buffer):
                return
        cursor.close()
        self._saved.pop(cursor.path.name, None)
        del self._cursors[cursor.path.name]
        self._dirty = True

    def _delivery(self, cursor: Cursor, line: Line, content: bytes) -> Delivery:
        tag = (cursor, line)
        redelivered = line.start < cursor.suspect
        where = "-" if cursor.path is None else cursor.path.name
        if line.too_long:
            return Delivery(
                None, cursor.topic, tag, raw=content[:RAW_KEPT_BYTES],
                problem=f"The line at byte {line.start} of {where} is longer than {self._line_bytes} bytes "
                "(line_bytes of File): only its beginning is kept.",
                redelivered=redelivered,
            )  # fmt: skip
        delivery = FILE.delivery(
            cursor.topic, content, (), tag=tag, content_type=EVENT, redelivered=redelivered,
            origin={"file": where, "offset": line.start},
        )  # fmt: skip
        if delivery.problem is not None:
            delivery.problem = f"Byte {line.start} of {where}: {delivery.problem}"
        return delivery


@dataclass(slots=True, eq=False)
class Line:
    """One delivered line: the byte offsets where it begins and ends, and whether it is settled."""

    start: int
    end: int
    too_long: bool
    settled: bool = False


@dataclass(slots=True, eq=False)
class Cursor:
    """Reads one stream line by line, and tracks the offset below which everything is settled."""

    path: Path | None  # None: standard input
    topic: str
    limit: int  # bytes per line
    fd: int
    inode: int = 0
    start: int = 0  # the offset of buffer[0]
    front: int = 0  # all lines before this offset are settled
    reach: int = 0  # no line from this offset on has been handed out
    ahead: int = 0  # how far the reach is ahead of the lines that were
    saved_reach: int = 0
    suspect: int = 0  # lines before this offset may have been handed out to a process that died
    buffer: bytearray = field(default_factory=bytearray)
    scanned: int = 0  # so many bytes of buffer contain no newline
    cut: tuple[int, bytes] | None = None  # an overlong line: its offset and beginning
    waiting: deque[Line] = field(default_factory=deque[Line])
    ended: bool = False  # the last read hit the end
    last: bool = False  # the file was replaced, so its end also ends a line
    beginning: bytes = b""  # of what was read
    rewritten: bool = False  # it begins otherwise by now

    def next_line(self, *, final: bool) -> tuple[Line, bytes] | None:
        """Return the next non-blank line and its content (of an overlong one, at least the beginning).

        None at the end; with `final`, the end also ends a line.
        """
        while True:
            newline = self.buffer.find(b"\n", self.scanned)
            if newline >= 0:
                line = self._take(newline + 1)
            elif self._read(watched=not final):
                continue
            elif (final or self.last) and self.ended and (self.buffer or self.cut):
                line = self._take(len(self.buffer))
            else:
                return None
            if line is not None:
                return line

    def _read(self, *, watched: bool) -> bool:
        if watched and os.pread(self.fd, len(self.beginning), 0) != self.beginning:
            # truncated, and perhaps as long again by now
            self.ended = self.rewritten = True
            return False
        self.scanned = len(self.buffer)
        if self.scanned > self.limit:
            if self.cut is None:
                self.cut = self.start, bytes(self.buffer[:RAW_KEPT_BYTES])
            self.start += self.scanned
            self.buffer.clear()
            self.scanned = 0
        if self.path is None and not select.select([self.fd], [], [], 0)[0]:
            # an empty pipe: reading would block
            return False
        chunk = os.read(self.fd, _CHUNK_BYTES)
        self.buffer += chunk
        self.ended = not chunk
        if self.path is not None and len(self.beginning) < _HEAD_BYTES:
            self.beginning = _beginning(self.fd, self.start + len(self.buffer))
        return bool(chunk)

    def _take(self, length: int) -> tuple[Line, bytes] | None:
        start, content = self.start, bytes(self.buffer[:length])
        del self.buffer[:length]
        self.scanned = 0
        self.start += length
        too_long = self.cut is not None or length > self.limit
        if self.cut is not None:
            start, content = self.cut
            self.cut = None
        if not too_long and not content.strip():
            # a blank line is settled along with the line before it
            if self.waiting:
                self.waiting[-1].end = self.start
            else:
                self.front = self.start
            return None
        line = Line(start, self.start, too_long)
        self.waiting.append(line)
        return line, content

    def settle(self, line: Line) -> None:
        line.settled = True
        while self.waiting and self.waiting[0].settled:
            self.front = self.waiting.popleft().end

    def extend_reach(self, line: Line, *, ahead: bool) -> None:
        """Cover a line that is to be handed out; with `ahead`, as many bytes again as it had to be extended by."""
        if line.start >= self.reach:
            longer = max(2 * self.ahead, line.end - line.start)
            self.ahead = min(longer, _AHEAD_BYTES) if ahead else 0
            self.reach = line.end + self.ahead

    def state(self) -> list[object]:
        """Return what identifies the file's settled part (its inode, length and beginning), and the reach."""
        if not self.waiting:
            self.reach = max(self.front, self.suspect)
            self.saved_reach = min(self.saved_reach, self.reach)
        return [self.inode, self.front, _digest(self.beginning[: self.front]), self.reach]

    def resume(self, state: list[object], size: int) -> None:
        """Continue after the settled part, if `state` belongs to this file, whose size is `size` bytes."""
        inode, front, head, reach = state
        if (
            isinstance(front, int)
            and isinstance(reach, int)
            and inode == self.inode
            and front <= size
        ):
            beginning = _beginning(self.fd, front)
            if head == _digest(beginning):
                self.start = self.front = front
                # what was written since has not been handed out
                self.suspect = self.reach = self.saved_reach = min(reach, size)
                self.beginning = beginning
                os.lseek(self.fd, front, os.SEEK_SET)

    def close(self) -> None:
        if self.fd >= 0 and self.path is not None:
            os.close(self.fd)
            self.fd = -1


def _is_unsaved(cursor: Cursor) -> bool:
    return cursor.reach > cursor.saved_reach


def _beginning(fd: int, end: int) -> bytes:
    return os.pread(fd, min(end, _HEAD_BYTES), 0)


def _digest(beginning: bytes) -> str:
    return hashlib.sha256(beginning).hexdigest()
