"""The brokers' servers, as in tests/brokers, and the clean run that others are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.brokers.conftest import kafka_bootstrap, pytest_collection_finish, rabbitmq_url
from tests.platform.platforms import Clean, clean_run

__all__ = ["clean", "kafka_bootstrap", "pytest_collection_finish", "rabbitmq_url"]


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    directory: Path = tmp_path_factory.mktemp("clean")
    return clean_run(directory)
