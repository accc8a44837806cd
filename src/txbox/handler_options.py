"""The options of a handler, checked when it is registered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from types import NoneType
from typing import Any, Literal, TypedDict

from txbox.body import Decoder
from txbox.errors import ConfigurationError
from txbox.extractor import Extractor, check_path
from txbox.identity import PayloadHash
from txbox.policy import GapPolicy, RetryPolicy

_FLAG = (bool, "True or False")
# what an option must be, and how to write it
_KINDS: dict[str, tuple[Any, str]] = {
    "retry": (RetryPolicy, "a RetryPolicy, such as RetryPolicy(max_attempts=3)"),
    "gaps": (GapPolicy, "a GapPolicy, such as GapPolicy(wait=timedelta(minutes=1))"),
    "timeout": ((timedelta, NoneType), "a timedelta, such as timedelta(seconds=3)"),
    "concurrency": (int, "a whole number"),
    "dead_letter_topic": ((str, NoneType), "the name of a topic"),
    **dict.fromkeys(
        (
            "batch", "pipeline", "transactional", "ordered", "dead_blocks", "weak_ids", "keep_result",
        ),
        _FLAG,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HandlerOptions:
    """The options of `App.handler`; their meaning is in the table of docs/reference/handlers.md.

    Raises:
        ConfigurationError: one is out of range, or two exclude one another.
    """

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    reject_on: tuple[type[Exception], ...] = ()
    timeout: timedelta | None = None
    concurrency: int = 1
    batch: bool = False
    pipeline: bool = False
    transactional: bool = True
    ordered: bool = False
    dead_blocks: bool = False
    dead_letter_topic: str | None = None
    sequence: Extractor | str | None = None
    gaps: GapPolicy = field(default_factory=GapPolicy)
    lock_key: Extractor | str | None = None
    message_id: Extractor | str | None = None
    weak_ids: bool = False
    id_scope: Literal["topic"] | None = None
    decode: Decoder | None = None
    payload_hash: PayloadHash = "raw"
    keep_payload: timedelta | Literal["unfinished", "always"] = "unfinished"
    keep_result: bool = False
    reply_to: str | Literal[True] | None = None
    mode: Literal["inline", "stored"] = "inline"

    def __post_init__(self) -> None:
        for name, (kinds, wanted) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                raise ConfigurationError(f"{name} is {value!r}: give {wanted}.")
        for name in ("message_id", "sequence", "lock_key"):
            check_path(name, getattr(self, name))
        if self.decode is not None and not callable(self.decode):
            raise ConfigurationError(
                f"decode is {self.decode!r}: give a callable from Message to body."
            )
        if self.dead_letter_topic == "":
            raise ConfigurationError("dead_letter_topic is '': give the name of a topic.")
        if self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}: it must be 1 or more.")
        if self.mode not in ("inline", "stored"):
            raise ConfigurationError(f"mode is {self.mode!r}: use 'inline' or 'stored'.")
        if self.id_scope not in (None, "topic"):
            raise ConfigurationError(f"id_scope is {self.id_scope!r}: use 'topic' or leave it out.")
        if self.payload_hash not in ("raw", "json") and not callable(self.payload_hash):
            raise ConfigurationError(
                f"payload_hash is {self.payload_hash!r}: use 'raw', 'json' or a callable."
            )
        _check_keep(self.keep_payload)
        if self.timeout is not None and self.timeout <= timedelta(0):
            raise ConfigurationError("timeout must be above zero.")
        self._check_order()
        self._check_answer()

    def _check_order(self) -> None:
        if self.dead_blocks and not self.ordered:
            raise ConfigurationError(
                "dead_blocks=True needs ordered=True: nothing waits without it."
            )
        if self.ordered and self.sequence is not None:
            raise ConfigurationError(
                "ordered=True and sequence= exclude one another: the order of arrival, or that of the versions."
            )
        if self.sequence is not None and self.batch:
            raise ConfigurationError("sequence= takes one message at a time: leave batch=True out.")
        if self.in_order and not self.transactional:
            raise ConfigurationError(
                "An order is decided in the handler's transaction: leave transactional=False out."
            )

    def _check_answer(self) -> None:
        if self.keep_result and self.batch:
            raise ConfigurationError(
                "keep_result=True keeps what one message returned: leave batch=True out."
            )
        if self.reply_to is not None and (self.batch or not self.transactional):
            raise ConfigurationError(
                "reply_to= stages what one message returned in its transaction: leave batch=True and "
                "transactional=False out."
            )
        named = isinstance(self.reply_to, str) and self.reply_to != ""
        if self.reply_to not in (None, True) and not named:
            raise ConfigurationError(
                f"reply_to is {self.reply_to!r}: name a topic, or say True for the message's reply-to header."
            )

    @property
    def in_order(self) -> bool:
        """True when a message may have to wait for others of its key."""
        return self.ordered or self.sequence is not None


class Options(TypedDict, total=False):
    """The options of `App.handler` that do not change how a handler is called."""

    type: str | None
    types: Iterable[str] | None
    retry: RetryPolicy | None
    reject_on: Sequence[type[Exception]]
    timeout: timedelta | None
    concurrency: int
    pipeline: bool
    ordered: bool
    dead_blocks: bool
    dead_letter_topic: str | None
    sequence: Extractor | str | None
    gaps: GapPolicy | None
    lock_key: Extractor | str | None
    message_id: Extractor | str | None
    weak_ids: bool
    id_scope: Literal["topic"] | None
    decode: Decoder | None
    payload_hash: PayloadHash
    keep_payload: timedelta | Literal["unfinished", "always"]
    keep_result: bool
    reply_to: str | Literal[True] | None
    mode: Literal["inline", "stored"]


def exceptions_of(given: Any) -> tuple[type[Exception], ...]:
    """Return `reject_on=` as a tuple, of one class too.

    Raises:
        ConfigurationError: it holds something else.
    """
    kinds = (given,) if isinstance(given, type) else tuple(given)
    if not all(isinstance(kind, type) and issubclass(kind, Exception) for kind in kinds):
        raise ConfigurationError(
            f"reject_on is {given!r}: give exception classes, as in (ValueError, KeyError)."
        )
    return kinds


def _check_keep(keep: object) -> None:
    if keep not in ("unfinished", "always") and not isinstance(keep, timedelta):
        raise ConfigurationError(
            f"keep_payload is {keep!r}: use 'unfinished', 'always' or a timedelta."
        )
