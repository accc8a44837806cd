"""The incarnation of a Kafka topic: one that is deleted and made again has another UUID."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from txbox.brokers.base import Delivery
from txbox.brokers.kafka_error import REFUSALS, ClientLog, text_of
from txbox.errors import BrokerUnavailable, UnusableMessage
from txbox.identity import message_id

_log = logging.getLogger("txbox")

_DESCRIBE_S = 5.0
_SHARED = (
    "bootstrap.", "security.", "sasl.", "ssl.", "socket.", "client.", "broker.", "enable.ssl",
    "oauth_cb", "metadata.", "https.",
)  # fmt: skip


class TopicIds:
    """Asks for each topic once."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {
            option: value for option, value in config.items() if option.startswith(_SHARED)
        }
        self._known: dict[str, str | None] = {}

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)

    def uuid(self, topic: str) -> str | None:
        """Return the topic's UUID; None when the broker is older than those, or does not tell it.

        Raises:
            BrokerUnavailable: nobody answers.
        """
        if topic not in self._known:
            try:
                admin = AdminClient(self._config, logger=ClientLog())
                asked: dict[str, Any] = admin.describe_topics(  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
                    TopicCollection([topic]), request_timeout=_DESCRIBE_S
                )
                uuid = str(asked[topic].result(_DESCRIBE_S + 1).topic_id)
            except (KafkaException, TimeoutError) as error:
                if isinstance(error, KafkaException) and error.args[0].code() in REFUSALS:
                    _log.warning("The UUID of %s is not told: %s", topic, text_of(error))
                    uuid = ""
                else:
                    raise BrokerUnavailable(
                        f"Kafka does not describe the topic {topic} ({text_of(error)})."
                    ) from error
            # brokers older than topic ids answer with zeros
            self._known[topic] = uuid if uuid.strip("A=") else None
        return self._known[topic]

    def identify(self, delivery: Delivery, partition: int, offset: int) -> None:
        """Add the weak id of a message that has no other, and only then: it takes a question."""
        message = delivery.message
        if message is None or message.headers.get("message-id"):
            return
        try:
            message_id(message)
        except UnusableMessage:
            uuid = self.uuid(delivery.topic)
        else:
            return
        if uuid is not None:
            weak_id = f"{uuid}/{partition}/{offset}"
            delivery.message = replace(message, origin={**message.origin, "weak_id": weak_id})
