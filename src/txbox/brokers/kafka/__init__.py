"""Kafka through confluent-kafka, which the extra `kafka` installs."""

from txbox.errors import ConfigurationError

try:
    from txbox.brokers.kafka.source import Kafka
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"The client {error.name} is not installed: run pip install 'txbox[kafka]'."
    ) from error

__all__ = ["Kafka"]
