"""Publishing to SQS: the conformance suite for publishers, and what is special about SQS."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from tests.support.brokers.rigs.sqs import ACCESS, SqsRig
from tests.support.servers.control import ThrowawayElasticMQ
from txbox import Message
from txbox.brokers.sqs import SQS
from txbox.errors import DestinationRefused, MessageRefused
from txbox.testing.brokers import (
    WITHIN_S,
    PublisherConformance,
    Rig,
    arrived,
    confirmed,
    ids,
    message,
    publisher_of,
    several,
)

pytestmark = pytest.mark.brokers


class TestSqsPublisher(PublisherConformance):
    many = 1000  # each request takes ten
    faster = 1.5  # the server is the bottle-neck

    @pytest.fixture
    def rig(self, sqs_url: str, request: pytest.FixtureRequest) -> Iterator[Rig]:
        # only a FIFO queue keeps an order
        with SqsRig(sqs_url, fifo="order" in request.node.name) as opened_rig:
            yield opened_rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_sqs: ThrowawayElasticMQ) -> Iterator[Rig]:
        with SqsRig(throwaway_sqs.url, throwaway_sqs) as opened_rig:
            yield opened_rig

    @contextmanager
    def too_large(self, rig: Rig) -> Iterator[Message[Any]]:
        yield message(rig, "large", payload=b"x" * 1_100_000)

    def test_more_headers_than_attributes_arrive(self, rig: Rig) -> None:
        headers = tuple((f"header-{number}", f"value {number}") for number in range(30))
        odd = (
            ("a name, with blanks", "1"),
            ("AWS.name", "2"),
            ("dots..dots", b"\0"),
            ("txbox-body", "3"),
        )
        with publisher_of(rig) as publisher:
            confirmed(publisher, [message(rig, "m1", type="t", headers=(*headers, *odd))])
        (found,) = arrived(rig, 1)
        assert found.type == "t"
        for name, value in (*headers, *odd):
            assert found.headers.get(name) == value

    def test_a_fifo_queue_takes_any_key_and_any_id_in_order(self, sqs_url: str) -> None:
        keys = ("k1", "a key with blanks", "ключ", "x" * 300)
        with SqsRig(sqs_url, fifo=True) as rig:
            sent = [
                message(rig, f"id {number} é", key=keys[number % 4], payload=str(number).encode())
                for number in range(60)
            ]
            with publisher_of(rig) as publisher:
                confirmed(publisher, sent)
                confirmed(publisher, sent)  # dropped by the queue: the same deduplication ids
            found = arrived(rig, 60)
        assert len(found) == 60
        for key in keys:
            numbers = [int(row.payload or b"") for row in found if row.key == key]
            assert numbers == sorted(numbers)
            assert len(numbers) == 15

    def test_batches_stay_below_the_limit_of_bytes(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            confirmed(
                publisher, [message(rig, number, payload=b"x" * 200_000) for number in range(12)]
            )
        assert ids(arrived(rig, 12)) == {str(number) for number in range(12)}

    def test_a_name_that_is_no_queue_is_refused(self, rig: Rig) -> None:
        with publisher_of(rig) as publisher:
            refused, kept = publisher.publish(
                [message(rig, "m1", topic="no queue!"), message(rig, "m2")], WITHIN_S
            )
        assert isinstance(refused, MessageRefused)
        assert kept is None

    @pytest.mark.parametrize(
        ("code", "status"),
        [
            ("KmsDisabled", 400), ("InvalidSignatureException", 400), ("AccessDenied", 403),
            ("AWS.SimpleQueueService.NonExistentQueue", 400), ("Unheard", 403),
        ],
    )  # fmt: skip
    def test_what_no_message_can_help_costs_none_an_attempt(
        self, rig: Rig, code: str, status: int
    ) -> None:
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        no_headers: Any = {}
        with publisher_of(rig) as publisher:
            confirmed(publisher, [message(rig, "m1")])
            publisher._client.meta.events.register(
                "before-call.sqs.SendMessageBatch",
                lambda **_: (AWSResponse("http://sqs/", status, no_headers, None), answer),
            )
            answers = publisher.publish(several(rig, 15), WITHIN_S)
        assert {type(error) for error in answers} == {DestinationRefused}
        assert {code in str(error) for error in answers} == {True}

    def test_queues_may_be_given_by_their_urls(self, rig: Rig, sqs_url: str) -> None:
        assert isinstance(rig, SqsRig)
        publisher = SQS(rig.url, endpoint_url=sqs_url, **ACCESS).publisher()
        confirmed(publisher, several(rig, 15))
        publisher.close()
        assert len(ids(arrived(rig, 15))) == 15
