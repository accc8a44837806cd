"""Publishing to NATS: the conformance suite for publishers, and what is special about NATS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.brokers.rigs.nats import NatsRig
from tests.support.servers.control import ThrowawayNats
from txbox.errors import DestinationRefused, MessageRefused, NotTried
from txbox.testing.brokers import (
    HOSTILE,
    WITHIN_S,
    PublisherConformance,
    arrived,
    confirmed,
    ids,
    message,
    publisher_of,
    several,
)

pytestmark = pytest.mark.brokers


class TestNatsPublisher(PublisherConformance):
    # a header is a line of text
    headers = tuple((name, "" if value is None else value) for name, value in HOSTILE)

    @pytest.fixture
    def rig(self, nats_url: str) -> Iterator[NatsRig]:
        with NatsRig(nats_url) as opened_rig:
            yield opened_rig

    @pytest.fixture
    def throwaway_rig(self, throwaway_nats: ThrowawayNats) -> Iterator[NatsRig]:
        with NatsRig(throwaway_nats.url, throwaway_nats) as opened_rig:
            yield opened_rig

    def test_what_would_break_the_protocol_is_refused(self, rig: NatsRig) -> None:
        topic = rig.topic
        batch = [
            message(rig, "m1", headers=(("h", "a\r\nNats-Msg-Id: b"),)),
            message(rig, "m2", headers=(("a: b", "c"),)),
            message(rig, "m3\r\n\r\n"),
            *(
                message(rig, "m4", topic=bad)
                for bad in (f"{topic} x", f"{topic}.*", f"{topic}.>", "")
            ),
            *(
                message(rig, "m5", topic=bad)
                for bad in (f"{topic}\r\nPING", f"{topic}..a", "x" * 5000)
            ),
        ]
        with publisher_of(rig) as publisher:
            answers = publisher.publish([*batch, message(rig, "good")], WITHIN_S)
        assert [type(answer) for answer in answers] == [MessageRefused] * len(batch) + [type(None)]
        assert ids(arrived(rig, 1)) == {"good"}

    def test_what_the_stream_itself_does_not_take(self, rig: NatsRig) -> None:
        rig.do(lambda js: js.update_stream(
            name=rig.stream, subjects=[f"{rig.stream}.>"], max_msg_size=500, max_msgs=2, discard="new",
        ))  # fmt: skip
        with publisher_of(rig) as publisher:
            first, large = publisher.publish(
                [message(rig, "m1"), message(rig, "m2", payload=b"x" * 1000)], WITHIN_S
            )
            assert first is None
            assert isinstance(large, MessageRefused)
            second, full = publisher.publish([message(rig, "m3"), message(rig, "m4")], WITHIN_S)
            assert second is None
            assert type(full) is DestinationRefused
            # the stream confirms what it already has, full or not
            confirmed(publisher, [message(rig, "m1")])

    def test_nothing_of_a_key_is_taken_behind_what_was_not(self, rig: NatsRig) -> None:
        rig.do(lambda js: js.update_stream(
            name=rig.stream, subjects=[f"{rig.stream}.>"], max_msg_size=500,
        ))  # fmt: skip
        run = [message(rig, name, key="k") for name in "abcde"]
        run[2] = message(rig, "c", key="k", payload=b"x" * 1000)
        others = [message(rig, name, key="o") for name in "xy"]
        with publisher_of(rig) as publisher:
            answers = publisher.publish([*run, *others], WITHIN_S)
            assert [type(answer) for answer in answers] == [
                type(None), type(None), MessageRefused, NotTried, NotTried, type(None), type(None),
            ]  # fmt: skip
            confirmed(publisher, run[3:])
        assert [found.id for found in arrived(rig, 6) if found.key == "k"] == ["a", "b", "d", "e"]

    def test_headers_that_steer_the_server_stay_behind(self, rig: NatsRig) -> None:
        rig.do(
            lambda js: js.update_stream(
                name=rig.stream, subjects=[f"{rig.stream}.>"], allow_rollup_hdrs=True
            )
        )
        headers = (("Nats-Rollup", "all"), ("nats-msg-id", "another"), ("kept", "1"))
        with publisher_of(rig) as publisher:
            confirmed(publisher, [*several(rig, 5), message(rig, "last", headers=headers)])
        found = {each.id: each for each in arrived(rig, 6)}
        assert found["last"].headers.get_all("kept") == ["1"]
        assert found["last"].headers.get_all("Nats-Msg-Id") == ["last"]

    def test_the_stream_keeps_one_of_what_is_published_again(self, rig: NatsRig) -> None:
        with publisher_of(rig) as publisher:
            for _ in range(3):
                confirmed(publisher, several(rig, 50))
        assert rig.do(lambda js: js.stream_info(rig.stream)).state.messages == 50
