"""What each broker's refusal costs: the message itself, its topic's pause, or the pause of all."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from aiormq import exceptions as amqp
from confluent_kafka import KafkaError
from redis._parsers.base import BaseParser
from yarl import URL

from txbox.brokers import nats, redis, sqs
from txbox.brokers.kafka import publisher as kafka
from txbox.brokers.rabbitmq.publisher import RabbitMQPublisher
from txbox.errors import BrokerError, DestinationRefused, MessageRefused

DEAD, ATTEMPT, TOPIC = MessageRefused, BrokerError, DestinationRefused

KAFKA = {
    DEAD: (
        "MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE", "INVALID_RECORD", "INVALID_TIMESTAMP", "TOPIC_EXCEPTION",
        "UNSUPPORTED_FOR_MESSAGE_FORMAT",
    ),
    TOPIC: (
        "UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION", "TOPIC_AUTHORIZATION_FAILED",
        "CLUSTER_AUTHORIZATION_FAILED", "GROUP_AUTHORIZATION_FAILED", "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        "SASL_AUTHENTICATION_FAILED", "_AUTHENTICATION", "POLICY_VIOLATION", "THROTTLING_QUOTA_EXCEEDED",
        "KAFKA_STORAGE_ERROR", "NOT_ENOUGH_REPLICAS", "NOT_ENOUGH_REPLICAS_AFTER_APPEND", "LEADER_NOT_AVAILABLE",
        "NOT_LEADER_FOR_PARTITION", "REQUEST_TIMED_OUT", "INVALID_REQUIRED_ACKS",
    ),
    ATTEMPT: ("UNKNOWN", "INVALID_MSG"),
}  # fmt: skip
#: As the server pairs code and err_code, in its errors.json.
NATS = {
    DEAD: ((400, 10054), (400, 10097)),
    TOPIC: (
        (400, 10002), (503, 10008), (500, 10009), (503, 10023), (500, 10028), (503, 10035), (503, 10039),
        (500, 10047), (404, 10059), (503, 10076), (503, 10077), (400, 10109), (500, 10118), (400, 10120),
    ),
    ATTEMPT: ((400, 10071), (400, 99999)),
}  # fmt: skip
SQS = {
    DEAD: ("InvalidMessageContents", "AWS.SimpleQueueService.BatchRequestTooLong", "InvalidParameterValue"),
    TOPIC: (
        "QueueDoesNotExist", "AWS.SimpleQueueService.NonExistentQueue", "AccessDenied", "AccessDeniedException",
        "InvalidClientTokenId", "SignatureDoesNotMatch", "InvalidSecurity", "KmsDisabled", "KmsAccessDenied",
        "KmsNotFound", "QueueDeletedRecently", "OptInRequired", "NotAuthorized",
    ),
    ATTEMPT: ("Unheard",),
}  # fmt: skip
REDIS_TOPIC = ("WRONGTYPE", "NOPERM")
REDIS_SERVER = (
    "MISCONF", "NOREPLICAS", "OOM", "READONLY", "LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "NOAUTH",
    "WRONGPASS", "BUSY", "MOVED", "ASK", "CROSSSLOT", "UNBLOCKED",
)  # fmt: skip


def walk(table: Any) -> list[Any]:
    return [
        pytest.param(answer, kind, id=str(answer)) for kind, row in table.items() for answer in row
    ]


@pytest.mark.parametrize(("name", "kind"), walk(KAFKA))
def test_kafka(name: str, kind: type) -> None:
    assert type(kafka._error_of(KafkaError(getattr(KafkaError, name)), "t")) is kind


@pytest.mark.parametrize(("codes", "kind"), walk(NATS))
def test_nats(codes: tuple[int, int], kind: type) -> None:
    error = {"code": codes[0], "err_code": codes[1], "description": "no"}
    answer = json.dumps({"error": error})
    assert type(nats._error_of(_nats(answer), "t")) is kind


def test_nats_without_a_stream() -> None:
    assert type(nats._error_of(_nats("", {"Status": "503"}), "t")) is TOPIC
    assert type(nats._error_of(_nats("pong"), "t")) is TOPIC


def _nats(data: str, headers: Any = None) -> Any:
    return SimpleNamespace(headers=headers, data=data.encode())


@pytest.mark.parametrize(("code", "kind"), walk(SQS))
def test_sqs(code: str, kind: type) -> None:
    assert type(sqs._error_of(sqs._CallError(code), "t")) is kind


@pytest.mark.parametrize("code", REDIS_SERVER)
def test_redis_server(code: str) -> None:
    assert redis._of_the_server(_redis(code))


@pytest.mark.parametrize(
    ("code", "kind"), [*((code, TOPIC) for code in REDIS_TOPIC), ("ERR", ATTEMPT)]
)
def test_redis_stream(code: str, kind: type) -> None:
    assert not redis._of_the_server(_redis(code))
    assert type(redis._error_of(_redis(code), "t")) is kind


def _redis(code: str) -> Exception:
    # as a server says it: with the client's own reading of it
    rest = "1 127.0.0.1:1" if code in ("MOVED", "ASK") else "it says why"
    parser: Any = BaseParser
    error: Exception = parser.parse_error(f"{code} {rest}")
    return error


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (amqp.ChannelNotFoundEntity(), TOPIC), (amqp.ChannelAccessRefused(), TOPIC),
        (amqp.ConnectionInternalError(), ATTEMPT), (amqp.ChannelPreconditionFailed(), DEAD),
        (amqp.ConnectionFrameError(), DEAD),
    ],
)  # fmt: skip
def test_rabbitmq(reason: BaseException, kind: type) -> None:
    publisher = RabbitMQPublisher(URL("amqp://localhost"), {}, exchange="", where="here")
    assert type(publisher._refusal("t", reason)) is kind
