"""Redis Streams through redis-py, which the extra `redis` installs."""

from txbox.errors import ConfigurationError

try:
    from txbox.brokers.redis.source import RedisStreams
except ModuleNotFoundError as error:
    raise ConfigurationError(
        "The client redis is not installed: run pip install 'txbox[redis]'."
    ) from error

__all__ = ["RedisStreams"]
