"""Calls to SQS: the client, and what its errors mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from txbox.errors import ConfigurationError

#: Concurrent requests, and connections kept for them.
WORKERS = 8
GONE = frozenset({"QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue"})
DENIED = frozenset({
    "UnrecognizedClientException", "InvalidClientTokenId", "SignatureDoesNotMatch", "InvalidAddress",
    "MissingAuthenticationToken", "AccessDenied", "AccessDeniedException", "InvalidSecurity",
    "AWS.SimpleQueueService.AccessDenied",
})  # fmt: skip
#: Errors the client raises itself, before calling.
NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"})
MALFORMED = "ParamValidation"
#: Throttling or server trouble, whatever the messages are.
_LATER = ("Throttl", "RequestThrottled", "OverLimit", "ServiceUnavailable", "InternalError",
          "InternalFailure", "RequestExpired", "ExpiredToken")  # fmt: skip


class CallError(Exception):
    """SQS refused a call or one of its entries, or could not be reached."""

    def __init__(self, code: str, *, sender: bool = True, away: bool = False) -> None:
        super().__init__(code)
        self.code = code
        self.away = away
        self.of_the_messages = (
            sender
            and not away
            and code not in GONE | DENIED
            and not any(fragment in code for fragment in _LATER)
        )


def new_client(given: Mapping[str, Any], within_s: float) -> Any:
    """Create a boto3 client from the options of SQS(…), with this read timeout in seconds.

    Raises:
        ConfigurationError: boto3 rejects the options.
    """
    import boto3.session
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError

    options = dict(given)
    config = Config(
        connect_timeout=min(3.0, within_s),
        read_timeout=within_s,
        retries={"mode": "standard", "max_attempts": 2},
        tcp_keepalive=True,
        max_pool_connections=WORKERS,
    )
    options["config"] = config.merge(options["config"]) if "config" in options else config
    try:
        session: Any = boto3.session.Session(profile_name=options.pop("profile_name", None))
        return session.client("sqs", **options)
    except (BotoCoreError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"boto3 cannot create an SQS client ({error}): check region, profile and options of SQS(…)."
        ) from error


def called(call: Callable[[], Any]) -> Any:
    """Call SQS; raises CallError."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        return call()
    except boto.ParamValidationError as error:
        raise CallError(MALFORMED) from error
    except boto.ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 400))
        away = status >= 500 or any(fragment in code for fragment in _LATER)
        raise CallError(code, away=away) from error
    except (boto.BotoCoreError, ResponseParserError) as error:
        # connections, timeouts, credentials that are temporarily unavailable
        raise CallError(type(error).__name__, away=True) from error
