"""What people see of an alert: golden texts, and what strangers' names cannot do in them."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from email import message_from_bytes, policy
from typing import Any

import pytest

from tests.support.recording import Recorder
from txbox import ConfigurationError, Message
from txbox.alerts import Alert, Channel, Smtp, dead, email, page, pagerduty, slack
from txbox.errors import BrokerError, BrokerUnavailable, MessageRefused, NotTried

ALERT = replace(
    dead("billing", "TimeoutError at pay.py:charge", "TimeoutError", 10_000),
    state="still",
    url="https://ops.example/txbox/messages?consumer=billing&status=dead",
)
#: Mentions, markup, a line break and a header, direction marks, an escape sequence, and 100,000 characters.
HOSTILE = (
    "<!channel> <https://evil|x> & *b*\r\nBcc: all@evil.example\u202e\x1b[31m\u2028" + "a" * 100_000
)


def body(channel: Channel, alert: Alert = ALERT) -> Any:
    content, content_type = channel.template(alert)
    assert content_type == "application/json"
    return json.loads(content)


def test_slack_gets_text_and_a_link() -> None:
    assert body(slack(Recorder())) == {
        "text": ":warning: Still: billing: 10,000 dead messages: TimeoutError at pay.py:charge\n"
        "Look at the error, then retry or discard.\n"
        "<https://ops.example/txbox/messages?consumer=billing&amp;status=dead|Open the dashboard>",
        "unfurl_links": False,
    }
    resolved = body(slack(Recorder()), replace(ALERT, state="resolved"))["text"]
    assert resolved.startswith(":white_check_mark: Resolved: billing:")
    assert "\n" not in resolved


def test_pagerduty_gets_events_that_open_and_end_one_incident() -> None:
    assert body(pagerduty("R" * 32, Recorder())) == {
        "routing_key": "R" * 32,
        "event_action": "trigger",
        "dedup_key": ALERT.key,
        "client": "txbox",
        "client_url": ALERT.url,
        "links": [{"href": ALERT.url, "text": "Dashboard"}],
        "payload": {
            "summary": "Still: billing: 10,000 dead messages: TimeoutError at pay.py:charge",
            "source": "billing",
            "severity": "warning",
            "component": "txbox",
            "class": "dead-messages",
            "custom_details": {
                "count": 10_000,
                "remedy": "Look at the error, then retry or discard.",
            },
        },
    }
    resolved = body(pagerduty("R" * 32, Recorder()), replace(ALERT, state="resolved"))
    assert (resolved["event_action"], resolved["dedup_key"]) == ("resolve", ALERT.key)


def test_mail_is_a_whole_message() -> None:
    content, content_type = email(
        Recorder(), "txbox@shop.example", "a@x.example", "b@x.example"
    ).template(ALERT)
    assert content_type == "message/rfc822"
    mail = message_from_bytes(content, policy=policy.default)
    assert dict(mail.items()) == {
        "Subject": "[txbox] Still: billing: 10,000 dead messages: TimeoutError at pay.py:charge",
        "From": "txbox@shop.example",
        "To": "a@x.example, b@x.example",
        "Auto-Submitted": "auto-generated",
        "References": f"<{ALERT.key}@txbox>",
        "Content-Type": 'text/plain; charset="utf-8"',
        "Content-Transfer-Encoding": "7bit",
        "MIME-Version": "1.0",
    }
    assert mail.get_content().splitlines() == [
        "Still: billing: 10,000 dead messages: TimeoutError at pay.py:charge",
        "",
        "Look at the error, then retry or discard.",
        "",
        "https://ops.example/txbox/messages?consumer=billing&status=dead",
    ]


def test_strangers_names_ping_nobody_add_no_header_and_are_short() -> None:
    alert = dead(HOSTILE, HOSTILE, "E")
    hostile = replace(
        alert, url="https://ops.example/" + page("messages", {"consumer": HOSTILE[:40]})
    )
    text = body(slack(Recorder()), hostile)["text"]
    first, _, link = text.split("\n")
    assert "<" not in first
    assert ">" not in first
    assert link.count("<") == link.count(">") == link.count("|") == 1
    assert len(text) < 3_000
    event = body(pagerduty("k", Recorder()), hostile)["payload"]
    assert len(event["summary"]) < 1_024
    assert event["summary"].isprintable()
    content, _ = email(Recorder(), "a@x.example", "b@x.example").template(hostile)
    mail = message_from_bytes(content, policy=policy.default)
    assert mail["Bcc"] is None
    assert len(str(mail["Subject"])) < 600
    assert dead(HOSTILE, HOSTILE, "E").key == alert.key


def test_a_key_of_pagerduty_is_rendered_at_the_end_and_stands_in_no_table() -> None:
    channel = pagerduty("secret-key", Recorder())
    payload = json.dumps(
        {name: getattr(ALERT, name) for name in ALERT.__dataclass_fields__}
    ).encode()
    sent = channel.rendered(Message(topic="txbox.alerts", id="1", payload=payload))
    assert b"secret-key" in (sent.payload or b"")
    assert b"secret-key" not in payload


# -- a mail server ----------------------------------------------------------------------------


class Mails(socketserver.ThreadingTCPServer):
    """Speaks as much SMTP as a client needs; `replies` says what it answers to a command."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Session)
        self.mails: list[bytes] = []
        self.replies: dict[str, str] = {}


class _Session(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, Mails)
        self.wfile.write(b"220 here\r\n")
        for line in self.rfile:
            word = line[:4].upper().decode()
            reply = server.replies.get(word, "250 ok")
            if reply == "gone":
                return
            if word == "DATA" and reply.startswith("250"):
                self.wfile.write(b"354 go on\r\n")
                mail = b""
                for part in self.rfile:
                    if part == b".\r\n":
                        break
                    mail += part
                server.mails.append(mail)
            self.wfile.write(f"{reply}\r\n".encode())
            if word == "QUIT":
                return


@contextmanager
def mails() -> Iterator[Mails]:
    with Mails() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def mail(number: int, channel: Channel) -> Message[Any]:
    content, _ = channel.template(ALERT)
    return Message(topic="txbox.alerts", id=f"m{number}", payload=content)


def test_a_mail_server_gets_each_alert_under_its_own_id() -> None:
    with mails() as server:
        smtp = Smtp("127.0.0.1", server.server_address[1], tls=False)
        channel = email(smtp, "a@x.example", "b@x.example", "c@x.example")
        publisher = smtp.publisher()
        assert publisher.publish([mail(1, channel), mail(2, channel)], 20) == [None, None]
        ids = [
            message_from_bytes(each, policy=policy.default)["Message-ID"] for each in server.mails
        ]
        assert ids == ["<m1@txbox>", "<m2@txbox>"]
        assert "secret" not in repr(Smtp("h", user="u", password="secret"))


@pytest.mark.parametrize(
    ("word", "reply", "answers"),
    [
        ("RCPT", "550 secret no such user", [MessageRefused, MessageRefused]),
        ("RCPT", "450 later", [BrokerError, BrokerError]),
        ("MAIL", "550 no", [MessageRefused, MessageRefused]),
        ("DATA", "gone", [BrokerError, NotTried]),
    ],
)
def test_what_a_mail_server_refuses(
    word: str, reply: str, answers: list[type[BrokerError]]
) -> None:
    with mails() as server:
        server.replies[word] = reply
        smtp = Smtp("127.0.0.1", server.server_address[1], tls=False)
        channel = email(smtp, "a@x.example", "b@x.example")
        said = smtp.publisher().publish([mail(1, channel), mail(2, channel)], 20)
        assert [type(answer) for answer in said] == answers
        assert "secret" not in str(said[0])


def test_a_mail_server_that_is_away_or_has_no_tls_costs_no_attempt() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(BrokerUnavailable, match="cannot be used"):
        Smtp("127.0.0.1", port, tls=False).publisher().publish([], 2)
    with mails() as server, pytest.raises(BrokerUnavailable, match="SMTPNotSupportedError"):
        Smtp("127.0.0.1", server.server_address[1]).publisher().publish([], 20)


def test_mail_needs_addresses() -> None:
    for sender, *to in (
        ["a@x.example"],
        ["a@x.example\nBcc: b@x.example", "c@x.example"],
        ["", "c@x.example"],
    ):
        with pytest.raises(ConfigurationError, match="sender"):
            email(Recorder(), sender, *to)
