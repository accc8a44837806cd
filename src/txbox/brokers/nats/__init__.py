"""NATS JetStream through nats-py, which the extra `nats` installs."""

from txbox.errors import ConfigurationError

try:
    from txbox.brokers.nats.source import Nats
except ModuleNotFoundError as error:
    raise ConfigurationError(
        f"The client {error.name} is not installed: run pip install 'txbox[nats]'."
    ) from error

__all__ = ["Nats"]
