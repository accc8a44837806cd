"""Webhooks: an ASGI application for an endpoint, and the schemes senders sign with."""

from txbox.brokers.webhook.endpoint import Receive, Scope, Send, Webhook, answer, by_path
from txbox.brokers.webhook.schemes import GitHub, StandardWebhooks, Stripe, Verified, Verify

__all__ = [
    "GitHub",
    "Receive",
    "Scope",
    "Send",
    "StandardWebhooks",
    "Stripe",
    "Verified",
    "Verify",
    "Webhook",
    "answer",
    "by_path",
]
