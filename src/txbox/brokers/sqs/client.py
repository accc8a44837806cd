"""What source and publisher share: calls to SQS, what its errors mean, and a message in its form."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

from txbox.brokers.envelope import PACKED, SQS, SQS_GROUPED, Pair, utf8
from txbox.errors import ConfigurationError, MessageRefused
from txbox.message import Headers, HeaderValue, Message

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
#: How to decode the body: "base64", or "empty" because SQS does not accept empty bodies.
_BODY = "txbox-body"
_ATTRIBUTES_MAX = 10
_NO_TEXT = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ATTRIBUTE = re.compile(r"(?!(?i:AWS\.|Amazon\.))(?!.*\.\.)(?!\.)[A-Za-z0-9_.-]{1,256}(?<!\.)")
_TOKEN = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,./:;<=>?@\[\\\]^_`{|}~-]{1,128}")


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


def queue_attributes(client: Any, queue: str) -> tuple[str, dict[str, str]]:
    """Return the URL and the attributes of a queue, given by name or URL; raises CallError."""
    url = queue
    if "/" not in queue:
        url = call(lambda: client.get_queue_url(QueueName=queue))["QueueUrl"]
    known = call(lambda: client.get_queue_attributes(QueueUrl=url, AttributeNames=["All"]))
    attributes: dict[str, str] = known["Attributes"]
    return url, attributes


def call(function: Callable[[], Any]) -> Any:
    """Call SQS; raises CallError."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError

    try:
        return function()
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


# -- a message as text and at most ten attributes ----------------------------------------------------


def entry_of(message: Message[Any], *, fifo: bool) -> dict[str, Any]:
    """Return the message as an entry of SendMessageBatch, without its Id.

    Raises:
        MessageRefused: SQS cannot carry it.
    """
    body, encoding = _body(SQS.payload(message))
    markers = {} if encoding is None else {_BODY: _attribute(encoding)}
    grouped = fifo and message.key is not None and _TOKEN.fullmatch(message.key) is not None
    pairs = list((SQS_GROUPED if grouped else SQS).headers(message))
    attributes, rest = _divided(pairs, _ATTRIBUTES_MAX - len(markers) - 1)
    if rest:
        markers[PACKED] = _attribute(json.dumps([_packed(pair) for pair in rest]))
    entry: dict[str, Any] = {"MessageBody": body, "MessageAttributes": attributes | markers}
    if fifo:
        unique = _token(str(message.id))
        entry["MessageDeduplicationId"] = unique
        entry["MessageGroupId"] = unique if message.key is None else _token(message.key)
    return entry


def size_of(entry: Mapping[str, Any]) -> int:
    """Return the size SQS counts: the body, plus each attribute's name, type and value."""
    size = len(entry["MessageBody"].encode())
    for name, attribute in entry["MessageAttributes"].items():
        value: str | bytes = (
            attribute["BinaryValue"] if "BinaryValue" in attribute else attribute["StringValue"]
        )
        size += len(name) + len(attribute["DataType"])
        size += len(value if isinstance(value, bytes) else value.encode())
    return size


def read(body: str, attributes: Mapping[str, Any]) -> tuple[bytes, Headers]:
    """Return payload and headers of a received message; one from another producer is read as it is."""
    pairs = [(name, _value(attribute)) for name, attribute in attributes.items()]
    encoding = dict(pairs).get(_BODY)
    if encoding in ("empty", "base64"):
        try:
            payload = b"" if encoding == "empty" else base64.b64decode(body, validate=True)
        except (binascii.Error, ValueError):
            # another producer's attribute of the same name
            return body.encode(), Headers(pairs)
        return payload, Headers(pair for pair in pairs if pair[0] != _BODY)
    return body.encode(), Headers(pairs)


def _body(payload: bytes) -> tuple[str, str | None]:
    if not payload:
        return "-", "empty"
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        text = "\0"
    if _NO_TEXT.search(text):
        return base64.b64encode(payload).decode(), "base64"
    return text, None


def _divided(pairs: list[Pair], room: int) -> tuple[dict[str, Any], list[Pair]]:
    """Split into attributes and headers that cannot be one: repeated, without a value, or one too many."""
    names = Counter(name for name, _ in pairs)
    attributes: dict[str, Any] = {}
    rest: list[Pair] = []
    for name, value in pairs:
        utf8(name)
        fits = names[name] == 1 and _ATTRIBUTE.fullmatch(name) and name not in (_BODY, PACKED)
        if isinstance(value, str):
            utf8(value)
            fits = fits and not _NO_TEXT.search(value)
        if fits and value and len(attributes) < room:
            attributes[name] = _attribute(value)
        else:
            rest.append((name, value))
    return attributes, rest


def _attribute(value: str | bytes) -> dict[str, Any]:
    if isinstance(value, bytes):
        return {"DataType": "Binary", "BinaryValue": value}
    return {"DataType": "String", "StringValue": value}


def _value(attribute: Mapping[str, Any]) -> HeaderValue:
    binary = str(attribute.get("DataType", "")).startswith("Binary")
    return cast("HeaderValue", attribute.get("BinaryValue" if binary else "StringValue"))


def _packed(pair: Pair) -> list[Any]:
    name, value = pair
    return [
        name,
        {"base64": base64.b64encode(value).decode()} if isinstance(value, bytes) else value,
    ]


def _token(text: str) -> str:
    """Return a valid group or deduplication id: the text itself, or its digest if SQS would refuse it."""
    if _TOKEN.fullmatch(text):
        return text
    return hashlib.sha256(utf8(text)).hexdigest()


def checked_queue(name: str) -> None:
    """Raise MessageRefused for a name that SQS does not allow."""
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,80}|(?=.{1,80}\Z)[A-Za-z0-9_-]+\.fifo", name):
        raise MessageRefused(
            f"{name!r} is not a valid queue name: SQS allows 80 letters, digits, - and _, and .fifo at the end."
        )
