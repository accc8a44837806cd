"""What a Kafka cluster says of its topics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._resource import ResourceType

from txbox.brokers.base import Facts
from txbox.brokers.kafka.librdkafka import REFUSALS, ClientLog, admin_options, text_of
from txbox.errors import BrokerUnavailable

_ASK_S = 5.0
_INTERNAL = "__"


def facts_of(config: Mapping[str, Any], topics: Sequence[str]) -> list[Facts]:
    """Ask for the settings of topics; "*" is every one that is not internal.

    Raises:
        BrokerUnavailable: nobody answers.
    """
    admin = AdminClient(admin_options(config), logger=ClientLog())
    try:
        named = admin.list_topics(timeout=_ASK_S).topics
    except KafkaException as error:
        raise BrokerUnavailable(f"No Kafka broker answers ({text_of(error)}).") from error
    wanted = topics
    if "*" in topics:
        wanted = sorted(topic for topic in named if not topic.startswith(_INTERNAL))
    there = [topic for topic in wanted if topic in named]
    settings = _settings(admin, there)
    return [
        _facts(topic, settings[topic]) if topic in settings else Facts(topic=topic, found=False)
        for topic in wanted
    ]


def _settings(admin: Any, topics: Sequence[str]) -> dict[str, dict[str, str] | KafkaError]:
    if not topics:
        return {}
    asked = admin.describe_configs(
        [ConfigResource(ResourceType.TOPIC, topic) for topic in topics], request_timeout=_ASK_S
    )
    found: dict[str, dict[str, str] | KafkaError] = {}
    for resource, answer in asked.items():
        try:
            entries = answer.result(_ASK_S + 1)
        except (KafkaException, TimeoutError) as error:
            if not isinstance(error, KafkaException) or error.args[0].code() not in _REFUSED:
                raise BrokerUnavailable(
                    f"Kafka does not describe the topic {resource.name} ({text_of(error)})."
                ) from error
            found[resource.name] = error.args[0]
        else:
            found[resource.name] = {name: str(entry.value) for name, entry in entries.items()}
    return found


_REFUSED = {*REFUSALS, KafkaError.CLUSTER_AUTHORIZATION_FAILED}


def _facts(topic: str, settings: dict[str, str] | KafkaError) -> Facts:
    if isinstance(settings, KafkaError):
        return Facts(
            topic=topic,
            unknown=(f"this user may not see it ({settings.str()}): allow DescribeConfigs.",),
        )
    kept_ms, segment_ms = float(settings["retention.ms"]), float(settings["segment.ms"])
    compacted = "compact" in settings["cleanup.policy"]
    bounded = kept_ms >= 0 and "delete" in settings["cleanup.policy"]
    said = f"retention.ms={kept_ms:.0f}, segment.ms={segment_ms:.0f}"
    return Facts(
        topic=topic,
        # a segment goes as a whole, when its last record is old enough
        replay_s=(kept_ms + segment_ms) / 1000 if bounded else math.inf,
        kept_s=kept_ms / 1000 if bounded else None,
        said={
            "replay_s": f"cleanup.policy={settings['cleanup.policy']}, {said}"
            if compacted
            else said,
            "kept_s": f"retention.ms={kept_ms:.0f}",
        },
    )
