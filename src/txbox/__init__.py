"""txbox: the transactional inbox and outbox. Effectively once for effects in your transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txbox.app import App as App
    from txbox.errors import BrokerError as BrokerError
    from txbox.errors import BrokerUnavailable as BrokerUnavailable
    from txbox.errors import ConfigurationError as ConfigurationError
    from txbox.errors import HandlerTimeout as HandlerTimeout
    from txbox.errors import MessageInProgress as MessageInProgress
    from txbox.errors import MessageRefused as MessageRefused
    from txbox.errors import PayloadMismatch as PayloadMismatch
    from txbox.errors import Reject as Reject
    from txbox.errors import Retry as Retry
    from txbox.errors import SchemaError as SchemaError
    from txbox.errors import StoreError as StoreError
    from txbox.errors import StoreUnavailable as StoreUnavailable
    from txbox.errors import TxboxError as TxboxError
    from txbox.errors import UnusableMessage as UnusableMessage
    from txbox.errors import VersionConflict as VersionConflict
    from txbox.inbox import Acceptance as Acceptance
    from txbox.inbox import Inbox as Inbox
    from txbox.message import Headers as Headers
    from txbox.message import Message as Message
    from txbox.outbox import Outbox as Outbox
    from txbox.outbox import Outgoing as Outgoing
    from txbox.outcome import Answer as Answer
    from txbox.outcome import Outcome as Outcome
    from txbox.outcome import Status as Status
    from txbox.policy import Batching as Batching
    from txbox.policy import GapPolicy as GapPolicy
    from txbox.policy import Lease as Lease
    from txbox.policy import Limits as Limits
    from txbox.policy import Redaction as Redaction
    from txbox.policy import RelayPolicy as RelayPolicy
    from txbox.policy import Retention as Retention
    from txbox.policy import RetryPolicy as RetryPolicy

__version__ = "0.1.0"

# keeps `import txbox` cheap: names are loaded on first use
_MODULES = {
    "app": ("App",),
    "inbox": ("Acceptance", "Inbox"),
    "outbox": ("Outbox", "Outgoing"),
    "message": ("Headers", "Message"),
    "outcome": ("Answer", "Outcome", "Status"),
    "policy": (
        "Batching",
        "GapPolicy",
        "Lease",
        "Limits",
        "Redaction",
        "RelayPolicy",
        "Retention",
        "RetryPolicy",
    ),
    "errors": (
        "BrokerError",
        "BrokerUnavailable",
        "ConfigurationError",
        "HandlerTimeout",
        "MessageInProgress",
        "MessageRefused",
        "PayloadMismatch",
        "Reject",
        "Retry",
        "SchemaError",
        "StoreError",
        "StoreUnavailable",
        "TxboxError",
        "UnusableMessage",
        "VersionConflict",
    ),
}
_PUBLIC = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [  # noqa: PLE0604  # all of them text
    "__version__",
    *_PUBLIC,  # pyright: ignore[reportUnsupportedDunderAll]
]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'txbox' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"txbox.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
