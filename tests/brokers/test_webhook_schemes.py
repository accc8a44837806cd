"""Signatures: published examples, and forgeries that are close."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.support.webhook.senders import SECRET, STANDARD_SECRET, github, standard, stripe
from txbox import ConfigurationError, Message, Outcome
from txbox.brokers.webhook import GitHub, StandardWebhooks, Stripe, Verified, Verify, Webhook
from txbox.message import Headers

BODY = b'{"id": "evt_1", "type": "invoice.paid", "created": 1700000000}'


def lower(headers: dict[str, str]) -> Headers:
    return Headers({name.lower(): value for name, value in headers.items()})


def test_github_accepts_the_example_of_its_documentation() -> None:
    headers = Headers(
        {
            "x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
        }
    )
    verify = GitHub("It's a Secret to Everybody")
    assert isinstance(verify(headers, b"Hello, World!"), Verified)
    assert verify(headers, b"Hello, World?") is False


def test_standard_webhooks_accepts_the_example_of_its_libraries() -> None:
    headers = Headers(
        {
            "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
            "webhook-timestamp": "1614265330",
            "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        }
    )
    secret, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", b'{"test": 2432232314}'
    for_ever = StandardWebhooks(secret, tolerance=timedelta(days=365_00))
    found = for_ever(headers, body)
    assert isinstance(found, Verified)
    assert found.id == "msg_p5jXN8AQM9LWM0D4loKWxJek"
    assert StandardWebhooks(secret)(headers, body) is False, "its time is long gone"


def test_svix_signs_in_the_same_way_under_headers_of_its_own() -> None:
    named = {name.replace("webhook-", "svix-"): value for name, value in lower(standard("m", BODY))}
    verify = StandardWebhooks(STANDARD_SECRET)
    found = verify(Headers(named), BODY)
    assert isinstance(found, Verified)
    assert found.id == "m"
    # those of one kind only: an unsigned id does not stand beside a signature
    mixed = {**named, "webhook-id": "other"}
    assert verify(Headers(mixed), BODY) is False
    assert verify(Headers(named), BODY + b" ") is False


def test_stripe_reads_id_type_and_time_of_the_event() -> None:
    found = Stripe(SECRET)(lower(stripe(BODY)), BODY)
    assert isinstance(found, Verified)
    assert (found.id, found.type) == ("evt_1", "invoice.paid")
    assert found.time is not None
    assert found.time.timestamp() == 1700000000


@pytest.fixture
def headers(request: pytest.FixtureRequest) -> dict[str, str]:
    """Signed when the test runs: signatures of the time of collection are stale by then."""
    sign: Callable[[], dict[str, str]] = request.param
    return sign()


@pytest.mark.parametrize(
    ("verify", "headers"),
    [
        (GitHub("old-secret", SECRET), lambda: github("d", BODY)),
        (Stripe("old-secret", SECRET), lambda: stripe(BODY)),
        (StandardWebhooks(b"o" * 64, STANDARD_SECRET), lambda: standard("m", BODY)),
    ],
    ids=["github", "stripe", "standard"],
    indirect=["headers"],
)
class TestEveryScheme:
    def test_any_of_several_secrets_will_do(self, verify: Verify, headers: dict[str, str]) -> None:
        assert isinstance(verify(lower(headers), BODY), Verified)

    def test_another_body_is_refused(self, verify: Verify, headers: dict[str, str]) -> None:
        assert verify(lower(headers), BODY + b" ") is False
        assert verify(lower(headers), b"") is False

    def test_every_header_is_needed_and_unaltered(
        self, verify: Verify, headers: dict[str, str]
    ) -> None:
        signed = [name for name in headers if re.search("(?i)signature|webhook-", name)]
        for name in signed:
            rest = {header: value for header, value in headers.items() if header != name}
            for wrong in ("", "sha256=", "t=,v1=", "v1,", "é" * 9, "9" * 5000, headers[name] + "0"):
                assert verify(lower(rest | {name: wrong}), BODY) is False, (name, wrong)
            assert verify(lower(rest), BODY) is False, name
            assert verify(Headers([*lower(rest), (name.lower(), b"\xff\xfe")]), BODY) is False


@pytest.mark.parametrize("age_s", [301, -305, 10**6])
def test_a_time_outside_the_tolerance_is_refused(age_s: int) -> None:
    assert Stripe(SECRET)(lower(stripe(BODY, age_s=age_s)), BODY) is False
    assert StandardWebhooks(STANDARD_SECRET)(lower(standard("m", BODY, age_s=age_s)), BODY) is False
    wide = timedelta(seconds=10**6 + 60)
    assert Stripe(SECRET, tolerance=wide)(lower(stripe(BODY, age_s=age_s)), BODY)


@pytest.mark.parametrize("text", ["backup.{}.tar", "{}.5"])
def test_a_signature_is_not_good_for_another_id(text: str) -> None:
    """`id.time.body` can be split elsewhere, if the body contains a time between dots."""
    soon = str(int(time.time()) + 60)
    body = text.format(soon)
    genuine = standard("msg_1", body.encode())
    verify = StandardWebhooks(STANDARD_SECRET)
    assert isinstance(verify(lower(genuine), body.encode()), Verified)
    before, after = body.split(f"{soon}.")
    moved = f"msg_1.{genuine['webhook-timestamp']}.{before}".removesuffix(".")
    forged = genuine | {"webhook-id": moved, "webhook-timestamp": soon}
    assert verify(lower(forged), after.encode()) is False


def test_an_id_that_is_no_text_of_utf_8_is_signed_by_nobody() -> None:
    """JSON can carry it, as in an event of AWS Lambda."""
    headers = {**standard("m", BODY), "webhook-id": "\ud800"}
    assert StandardWebhooks(STANDARD_SECRET)(lower(headers), BODY) is False


def test_an_id_of_standard_webhooks_may_have_dots() -> None:
    found = StandardWebhooks(STANDARD_SECRET)(lower(standard("order.2026.7", BODY)), BODY)
    assert isinstance(found, Verified)
    assert found.id == "order.2026.7"


@pytest.mark.parametrize(
    "wrong",
    [
        GitHub,
        lambda: GitHub(""),
        lambda: GitHub("7 bytes"),
        lambda: Stripe("good-enough", b""),
        lambda: Stripe(SECRET, tolerance=timedelta(0)),
        lambda: StandardWebhooks("whsec_"),
        lambda: StandardWebhooks("not base64!"),
        lambda: StandardWebhooks(b"x" * 23),
        lambda: StandardWebhooks(b"x" * 65),
        lambda: Webhook(_nothing, topic="t", verify=_async_verify),  # type: ignore[arg-type]
        lambda: Webhook(_nothing, topic="t", verify=GitHub(SECRET), body_bytes=0),
        lambda: Webhook(_nothing, topic="t", verify=GitHub(SECRET), answer_within=timedelta(0)),
    ],
)
def test_what_can_never_be_safe_is_refused_at_once(wrong: object) -> None:
    with pytest.raises(ConfigurationError):
        wrong()  # type: ignore[operator]


async def _async_verify(headers: Headers, body: bytes) -> bool:
    return True


async def _nothing(message: Message[Any]) -> dict[str, Outcome]:
    return {}
