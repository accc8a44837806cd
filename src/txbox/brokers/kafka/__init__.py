"""Kafka through confluent-kafka, which the extra `kafka` installs."""

from txbox.errors import installed

with installed("kafka", "Kafka"):
    from txbox.brokers.kafka.source import Kafka

__all__ = ["Kafka"]
