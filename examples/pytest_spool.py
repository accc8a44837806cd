"""Tests of the source and the publisher of spool.py, with txbox's suites: pytest pytest_spool.py"""

import json
import shutil
import time
from datetime import timedelta
from pathlib import Path

import pytest
from spool import Spool

from txbox.testing.brokers import Note, PublisherConformance, Rig, SourceConformance


class SpoolRig(Rig):
    lacks = {
        "native ids": "a file has a place, which is not the producer's",
        "tombstones": "a file has bytes, perhaps none",
        "batches": "each file is flushed by itself",
        "server": "the file system is always there",
    }
    redelivery_s = 2.0

    @property
    def directory(self) -> Path:
        return Path(self.address, self.topic)

    @property
    def impatient(self):
        return {"lease": timedelta(seconds=self.redelivery_s)}

    def create(self) -> None:
        self.directory.mkdir()

    def remove(self) -> None:
        shutil.rmtree(self.directory)

    def publish(self, *messages: Note) -> None:  # as another program would: not by the publisher
        for note in messages:
            pairs = [
                (name, {"hex": value.hex()} if isinstance(value, bytes) else value)
                for name, value in note.pairs
            ]
            hidden = self.directory / f".{time.time_ns():020d}"
            hidden.write_bytes(json.dumps(pairs).encode() + b"\n" + (note.payload or b""))
            hidden.rename(self.directory / f"{hidden.name[1:]}.0")

    def source(self, **options) -> Spool:
        return Spool(self.address, **options)

    def outstanding(self) -> int:
        return len(list(self.directory.iterdir()))


@pytest.fixture
def rig(tmp_path):
    with SpoolRig(str(tmp_path)) as rig:
        yield rig


class TestSpool(SourceConformance):
    pass


class TestSpoolPublisher(PublisherConformance):
    many = 500
