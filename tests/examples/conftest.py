"""The brokers' servers, as in tests/brokers."""

from __future__ import annotations

from tests.brokers.conftest import pytest_collection_finish, rabbitmq_url

__all__ = ["pytest_collection_finish", "rabbitmq_url"]
