"""One file as it is read: line by line, and how far its lines are settled without a gap."""

from __future__ import annotations

import hashlib
import os
import select
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

#: What is kept of a line that is too long.
RAW_KEPT_BYTES = 64 * 1024
_CHUNK_BYTES = 256 * 1024
_HEAD_BYTES = 256


@dataclass(slots=True, eq=False)
class Span:
    """One delivered line: where it ends (byte offset), and whether it is settled."""

    end: int
    settled: bool = False


@dataclass(slots=True, eq=False)
class Line:
    """What was read of a line; of one that is too long at least its beginning."""

    start: int  # the offset of its first byte
    content: bytes
    span: Span
    too_long: bool = False


@dataclass(slots=True, eq=False)
class Cursor:
    """Reads one stream line by line and knows the end of its gapless settled front."""

    path: Path | None  # None: standard input
    topic: str
    limit: int  # bytes of a line
    fd: int
    inode: int = 0
    start: int = 0  # the offset of buffer[0]
    front: int = 0  # all lines before this offset are settled
    buffer: bytearray = field(default_factory=bytearray)
    scanned: int = 0  # so many bytes of buffer hold no newline
    cut: tuple[int, bytes] | None = None  # an endless line: its offset and its beginning
    waiting: deque[Span] = field(default_factory=deque[Span])
    head: str = ""  # of the settled part when the file was closed
    ended: bool = False  # the last read met the end
    last: bool = False  # the file was replaced: its end also ends a line

    def next_line(self, *, final: bool) -> Line | None:
        """Return the next line that is not blank, or None at the end; `final`: the end also ends a line."""
        while True:
            newline = self.buffer.find(b"\n", self.scanned)
            if newline >= 0:
                line = self._take(newline + 1)
            elif self._read():
                continue
            elif (final or self.last) and self.ended and (self.buffer or self.cut):
                line = self._take(len(self.buffer))
            else:
                return None
            if line is not None:
                return line

    def _read(self) -> bool:
        self.scanned = len(self.buffer)
        if self.scanned > self.limit:
            if self.cut is None:
                self.cut = self.start, bytes(self.buffer[:RAW_KEPT_BYTES])
            self.start += self.scanned
            self.buffer.clear()
            self.scanned = 0
        if self.path is None and not select.select([self.fd], [], [], 0)[0]:
            # a pipe with nothing in it yet: reading would wait
            return False
        chunk = os.read(self.fd, _CHUNK_BYTES)
        self.buffer += chunk
        self.ended = not chunk
        return bool(chunk)

    def _take(self, length: int) -> Line | None:
        start, content = self.start, bytes(self.buffer[:length])
        del self.buffer[:length]
        self.scanned = 0
        self.start += length
        too_long = self.cut is not None or length > self.limit
        if self.cut is not None:
            start, content = self.cut
            self.cut = None
        if not too_long and not content.strip():
            # a blank line is settled together with the line before it
            if self.waiting:
                self.waiting[-1].end = self.start
            else:
                self.front = self.start
            return None
        span = Span(self.start)
        self.waiting.append(span)
        return Line(start, content, span, too_long)

    def settle(self, span: Span) -> None:
        span.settled = True
        while self.waiting and self.waiting[0].settled:
            self.front = self.waiting.popleft().end

    def state(self) -> list[object]:
        """What identifies the file's settled part: its inode, its length and its beginning."""
        if self.fd >= 0:
            self.head = _head(self.fd, self.front)
        return [self.inode, self.front, self.head]

    def resume(self, state: list[object], size: int) -> None:
        """Continue after the settled part, if this is still the file that `state` was of, now `size` bytes."""
        inode, front, head = state
        if (
            isinstance(front, int)
            and inode == self.inode
            and front <= size
            and head == _head(self.fd, front)
        ):
            self.start = self.front = front
            os.lseek(self.fd, front, os.SEEK_SET)

    def close(self) -> None:
        if self.fd >= 0 and self.path is not None:
            self.state()
            os.close(self.fd)
            self.fd = -1


def _head(fd: int, front: int) -> str:
    return hashlib.sha256(os.pread(fd, min(front, _HEAD_BYTES), 0)).hexdigest()
