"""txbox: the transactional inbox and outbox. Effectively once for effects in your transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from txbox.app import App as App
    from txbox.errors import ConfigurationError as ConfigurationError
    from txbox.errors import MessageInProgress as MessageInProgress
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
    from txbox.outcome import Outcome as Outcome
    from txbox.outcome import Status as Status
    from txbox.policy import Batching as Batching
    from txbox.policy import Lease as Lease
    from txbox.policy import Limits as Limits
    from txbox.policy import Retention as Retention
    from txbox.policy import RetryPolicy as RetryPolicy

__version__ = "0.1.0"

# name → module: `import txbox` stays cheap, a name is loaded when it is first used
_PUBLIC = {
    "App": "app",
    "Inbox": "inbox",
    "Acceptance": "inbox",
    "Message": "message",
    "Headers": "message",
    "Outcome": "outcome",
    "Status": "outcome",
    **dict.fromkeys(("RetryPolicy", "Lease", "Retention", "Batching", "Limits"), "policy"),
    **dict.fromkeys(
        (
            "TxboxError", "ConfigurationError", "SchemaError", "StoreError", "StoreUnavailable", "UnusableMessage",
            "PayloadMismatch", "MessageInProgress", "Retry", "Reject", "VersionConflict",
        ),
        "errors",
    ),
}  # fmt: skip

__all__ = ["__version__", *_PUBLIC]  # noqa: PLE0604  # the names above, each a string


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'txbox' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"txbox.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
