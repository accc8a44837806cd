"""RabbitMQ through aio-pika, which the extra `rabbitmq` installs."""

from txbox.errors import installed

with installed("rabbitmq", "RabbitMQ"):
    from txbox.brokers.rabbitmq.source import RabbitMQ

__all__ = ["RabbitMQ"]
