"""RabbitMQ through aio-pika, which the extra `rabbitmq` installs."""

from txbox.errors import ConfigurationError

try:
    from txbox.brokers.rabbitmq.source import RabbitMQ
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"The client {error.name} is not installed: run pip install 'txbox[rabbitmq]'."
    ) from error

__all__ = ["RabbitMQ"]
