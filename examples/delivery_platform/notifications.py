"""The notification service: a mail for each status of a package; `txbox run delivery_platform.notifications:app`.

Its inbox absorbs what the relay of the scan service sends twice. A mail cannot be rolled back, so it is
an effect: carried out after the commit, at least once, under one key. Mail servers know no such keys,
but who reads mail does: copies have one Message-ID, of which mail programs show one.
"""

from __future__ import annotations

import smtplib
from dataclasses import dataclass
from email.message import EmailMessage
from typing import Any

from delivery_platform import settings
from delivery_platform.settings import STATUS
from txbox import Message

app = settings.service("notifications")


@dataclass(frozen=True)
class Status:
    """What the scan service stages."""

    package: str
    version: int
    status: str


@app.handler(STATUS, type="package.status.changed", consumer="notifications")
def changed(message: Message[Status], tx: Any) -> None:
    """Have the receiver told."""
    status = message.body
    app.effects.stage(
        tx,
        "send-mail",
        {
            "to": f"receiver-of-{status.package}@example.org",
            "subject": f"{status.package} is {status.status}",
        },
        key=status.package,
    )


@app.effect("send-mail", retry=settings.MAIL_RETRY)
def send_mail(message: Message[dict[str, str]]) -> dict[str, str]:
    """Send one mail; what is returned is kept as the effect's result."""
    mail = EmailMessage()
    mail["From"] = "platform@example.org"
    mail["To"] = message.body["to"]
    mail["Subject"] = message.body["subject"]
    mail["Message-ID"] = f"<{message.id}@platform.example.org>"
    mail["X-Idempotency-Key"] = message.idempotency_key
    mail.set_content(f"{message.body['subject']}.")
    host, _, port = settings.SMTP.rpartition(":")
    with smtplib.SMTP(host, int(port), timeout=10) as server:
        server.send_message(mail)
    return {"message_id": mail["Message-ID"]}
