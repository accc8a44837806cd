"""Encodes anew, under the current key of an App's codec, what is stored plain or under an older key."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple, Unpack

from txbox.admin.changes import (
    ChangeOptions,
    Changes,
    Key,
    again,
    audit_of,
    result_of,
    transaction,
)
from txbox.admin.reader import Audit
from txbox.admin.tables import Filter, InboxFilter, OutboxFilter, QuarantineFilter
from txbox.errors import ConfigurationError, UnreadableMessage, UnusableMessage
from txbox.session import Session
from txbox.store.codec import Row, Texts
from txbox.store.inbox import InboxStore

_PAGE = 1_000
# a batch ends at the first of these, so that its locks are short whatever the rows and the codec are
_ROWS, _BYTES, _LONGEST_S = 100, 4 * 1024 * 1024, 0.25
_PATIENCE, _AGAIN_S = timedelta(seconds=30), 0.25
_REASONS = 10


class _Kind(NamedTuple):
    """A table with encoded texts.

    Attributes:
        key: parameters that name a row; they are the first columns of a stretch, too.
        start: before the first row.
        leased: the query that says which rows there are, of a table whose rows may be leased.
    """

    name: str
    key: tuple[str, ...]
    start: Key
    where: Filter[Any, Any]
    action: str
    leased: str | None = None

    def row(self, key: Key) -> Row:
        """What the texts of a row are bound to."""
        named = dict(zip(self.key, key, strict=True))
        hashed = named.get("hash")
        return Row(
            named.get("consumer"), named["message_id"], None if hashed is None else bytes(hashed)
        )


_KINDS = (
    _Kind("inbox", ("consumer", "message_id"), ("", ""), InboxFilter(), "encrypt", "explain_inbox"),
    # as later ones are written under the current key, a row's attempts are behind it
    _Kind("attempt", ("number", "consumer", "message_id"), (-1, "", ""), InboxFilter(), "encrypt attempts"),
    _Kind("quarantine", ("consumer", "message_id", "hash"), ("", "", b""), QuarantineFilter(), "quarantine encrypt"),
    _Kind("outbox", ("message_id",), ("",), OutboxFilter(), "outbox encrypt", "explain_outbox"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class EncryptedTable:
    """What became of the rows of one table.

    Attributes:
        count: encoded anew; in a dry run those that would be.
        plain: how many of those had a plain text.
        leased: skipped, leased by a worker or a relay until `patience` ended.
        unreadable: skipped, because the codec cannot read them, or lacks their key.
    """

    table: str
    count: int
    plain: int
    leased: int
    unreadable: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Encrypted:
    """What an encryption did, or in a dry run would do.

    Attributes:
        key_id: the key of all texts now, except in the skipped rows.
        reasons: why rows were unreadable, each once.
        cancelled: it ended before every row was looked at.
    """

    dry_run: bool
    key_id: str
    tables: tuple[EncryptedTable, ...]
    reasons: tuple[str, ...] = ()
    cancelled: bool = False

    @property
    def complete(self) -> bool:
        """Whether no row was skipped."""
        return not self.cancelled and not any(of.leased or of.unreadable for of in self.tables)


@dataclass(slots=True)
class _Batch:
    """What became of the first rows of a list: `scanned` is how many."""

    scanned: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    leased: list[Key] = field(default_factory=list[Key])
    reasons: list[str] = field(default_factory=list[str])

    def add(self, other: _Batch) -> None:
        self.scanned += other.scanned
        self.counts += other.counts
        self.leased += other.leased
        self.reasons += other.reasons


class Encryption(Changes):
    """Encodes rows anew."""

    def encrypt(
        self, *, patience: timedelta = _PATIENCE, **how: Unpack[ChangeOptions]
    ) -> Encrypted:
        """Encode all texts anew that are plain, or under another key than the first one of App(codec=…).

        Workers may run at the same time if all of them have this codec. Rows written plain or under an older key
        behind this scan need another run. Plain texts are encoded as they are.

        Args:
            patience: how long to wait for rows that a worker or a relay has leased.

        Raises:
            ConfigurationError: the App has no codec.

        Guarantee: a row's texts and its key change in one commit, with the audit row of the batch, and only while the
            row is neither leased nor locked. After a crash, call it again: finished rows are skipped.
        """
        return result_of(self.encrypt_batches(patience=patience, **how))

    def encrypt_batches(
        self, *, patience: timedelta = _PATIENCE, **how: Unpack[ChangeOptions]
    ) -> Generator[Encrypted]:
        """Do what `encrypt` does, and yield what was encoded so far after every thousand rows that were looked at.

        The last one yielded is the result. Leaving the loop ends it there.
        """
        key_id = self.store.columns.key_id
        if key_id is None:
            raise ConfigurationError(
                "There is nothing to encode with: give the App its codec, such as App(codec=AesGcm({…}))."
            )
        audit, most = audit_of(how), how.get("most")
        done = Encrypted(dry_run=audit is None, key_id=key_id, tables=())
        for kind in _KINDS:
            before, counts = done, Counter[str]()
            for total, cancelled in self._of_table(kind, audit, patience, most):
                counts = total.counts
                table = EncryptedTable(
                    table=f"txbox_{kind.name}",
                    count=counts["count"],
                    plain=counts["plain"],
                    leased=len(total.leased),
                    unreadable=counts["unreadable"],
                )
                done = replace(
                    before,
                    tables=(*before.tables, table),
                    reasons=tuple(dict.fromkeys((*before.reasons, *total.reasons)))[:_REASONS],
                    cancelled=before.cancelled or cancelled,
                )
                yield done
            most = None if most is None else most - counts["count"]

    def _of_table(
        self, kind: _Kind, audit: Audit | None, patience: timedelta, most: int | None
    ) -> Generator[tuple[_Batch, bool]]:
        """Yield what became of the rows of a table so far, and whether `most` has ended it."""
        total, cancelled = _Batch(), False
        try:
            for page in self._pages(kind):
                rest = None if most is None else most - total.counts["count"]
                if cancelled := rest is not None and rest <= 0:
                    break
                keys = self._behind(page, total.counts if audit is None else Counter())
                if audit is not None:
                    total.add(self._encode(kind, keys[:rest], audit))
                yield total, False
            until = time.monotonic() + patience.total_seconds()
            while audit is not None and total.leased and time.monotonic() < until:
                yield total, cancelled
                time.sleep(_AGAIN_S)
                leased, total.leased = total.leased, []
                total.add(self._encode(kind, leased, audit))
                total.leased = self._there(kind, total.leased)
        finally:
            self.emit(kind.action, total.counts["count"], audit)
        yield total, cancelled

    def _pages(self, kind: _Kind) -> Iterator[Sequence[Sequence[Any]]]:
        """The rows of a table in the order of its key, each with its key and the beginnings of its texts."""
        after, query = kind.start, f"encrypt_{kind.name}"
        params = {"limit": _PAGE, "length": self.store.columns.prefix_length}
        while True:
            if kind.name == "inbox" and after[1] == "":
                # one consumer after the other: MySQL has no range of the index for both columns
                rows = self.rows("explain_consumers", {"after": after[0], "limit": 1})
                if not rows:
                    return
                after = (rows[0][0], "")
            page = self.rows(query, {**params, **dict(zip(kind.key, after, strict=True))})
            if page:
                yield page
            if len(page) == _PAGE:
                after = tuple(page[-1][: len(kind.key)])
            elif kind.name == "inbox":
                after = (after[0], "")
            else:
                return

    def _behind(self, page: Sequence[Sequence[Any]], counts: Counter[str]) -> list[Key]:
        """The keys of the rows that need it."""
        keys: list[Key] = []
        for *key, key_id, has_payload, headers, error, result in page:
            kept = None if result is None else bytes(result)
            texts = Texts(key_id, b"" if has_payload else None, headers, error, kept)
            if how := self.store.columns.behind(texts):
                keys.append(tuple(key))
                counts.update(("count", "plain") if how == "plain" else ("count",))
        return keys

    def _encode(self, kind: _Kind, keys: Sequence[Key], audit: Audit) -> _Batch:
        """Encode rows anew, batch by batch."""
        total = _Batch()
        while total.scanned < len(keys):
            rest = keys[total.scanned : total.scanned + _ROWS]
            total.add(self.on_database(again, _batch, self.store, kind, rest, audit))
        return total

    def _there(self, kind: _Kind, keys: Sequence[Key]) -> list[Key]:
        """Those that are still there, of rows that could not be read."""
        if kind.leased is None or not keys:
            return []
        columns = dict(zip(kind.key, zip(*keys, strict=True), strict=True))
        existing = {tuple(row[: len(kind.key)]) for row in self.rows(kind.leased, rows=columns)}
        return [key for key in keys if key in existing]


async def _batch(
    db: Session, store: InboxStore, kind: _Kind, keys: Sequence[Key], audit: Audit
) -> _Batch:
    """Encode the first rows anew in a transaction of its own.

    Guarantee: leased or locked rows are skipped without waiting; texts, key and audit row are one commit.
    """
    done, size_bytes, until = _Batch(), 0, time.monotonic() + _LONGEST_S
    async with transaction(db):
        for key in keys:
            done.scanned += 1
            named = dict(zip(kind.key, key, strict=True))
            selected = await db.execute(store.dialect.statement(f"encrypt_{kind.name}_row", named))
            if not selected.rows:
                done.leased.append(key)
                continue
            key_id, payload, headers, error, result = selected.rows[0]
            texts = Texts(key_id, _bytes(payload), headers, error, _bytes(result))
            how = store.columns.behind(texts)
            if how is None:
                continue
            try:
                anew = store.columns.encoded_anew(texts, kind.row(key))
            except (UnreadableMessage, UnusableMessage) as failure:
                done.counts["unreadable"] += 1
                done.reasons.append(str(failure))
                continue
            params = {**named, **anew._asdict()}
            await db.execute(store.dialect.statement(f"encrypt_{kind.name}_write", params))
            done.counts.update(("count", "plain") if how == "plain" else ("count",))
            size_bytes += len(texts.payload or b"") + len(texts.result or b"")
            if size_bytes > _BYTES or time.monotonic() > until:
                break
        if count := done.counts["count"]:
            await db.execute(audit.row(store.dialect, kind.action, kind.where, count))
    return done


def _bytes(value: Any) -> bytes | None:
    return None if value is None else bytes(value)
