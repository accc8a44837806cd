"""The suites for sources and publishers: the broker of `examples/spool.py` passes them, and each of its defects fails
at the points that are about it, and at no other.

By default a defect meets the first of its points; `make test-slow` has it meet them all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT, Page
from tests.examples.programs import EXAMPLES
from tests.support.brokers.rigs import ServerRig
from txbox.brokers import base
from txbox.errors import BrokerUnavailable
from txbox.testing import brokers
from txbox.testing.brokers import PublisherConformance, Rig, SourceConformance

sys.path.append(str(EXAMPLES))
_EXAMPLE: Any = import_module("pytest_spool")
TestSpool, TestSpoolPublisher = _EXAMPLE.TestSpool, _EXAMPLE.TestSpoolPublisher
_EXAMPLE.SpoolRig.python = ServerRig.python  # warm processes
rig = _EXAMPLE.rig

PAGE = Page(ROOT / "docs/howto/write-a-source.md")
TEXT = (EXAMPLES / "spool.py").read_text()


@dataclass(frozen=True)
class Defect:
    """What is wrong, as texts of spool.py with what is put in their places, and the points that see it."""

    does: str
    changes: Mapping[str, str]
    points: tuple[str, ...]

    def applied(self) -> str:
        text = TEXT
        for before, after in self.changes.items():
            assert text.count(before) == 1, (
                f"{self.does}: {before!r} stands there {text.count(before)} times"
            )
            text = text.replace(before, after)
        return text


_AGAIN = "test_unacknowledged_comes_again_and_has_one_effect"
_WEAK = "test_coordinates_are_an_id_on_request_only"
_DRAIN = "test_a_drain_settles_what_ended_and_leaves_the_rest"
_KILLED = "test_a_killed_worker_loses_and_doubles_nothing"
_SLOW = "test_a_slow_handler_keeps_its_message"
_AWAY = "test_while_the_database_is_away_nothing_is_given_back_or_counted"

SOURCES = {
    "acks-before-commit": Defect(
        "it acknowledges what it delivers",
        {
            "return deliveries\n": "return [each for each in deliveries if not each.tag.unlink()]\n",
            "                failed += 1\n": "                continue\n",
        },
        (_KILLED, _AGAIN, _WEAK, _DRAIN),
    ),
    "drops-on-close": Defect(
        "close deletes what was not settled",
        {"os.utime(path, (0, 0))  # free at once": "path.unlink()"},
        (_DRAIN, _AGAIN, _WEAK),
    ),
    "loses-a-redelivery": Defect(
        "it delivers only what is new",
        {'if path.name[0] != "." and': 'if path.suffix == ".0" and'},
        (_AGAIN, _WEAK, _DRAIN, _KILLED),
    ),
    "counts-no-deliveries": Defect(
        "it does not say that it is a redelivery",
        {'redelivered=times != "1"': "redelivered=False"},
        (_AGAIN,),
    ),
    "settles-twice": Defect(
        "it raises what is no BrokerError for what is settled already",
        {"unlink()\n            except FileNotFoundError": "unlink()\n            except KeyError"},
        ("test_settled_in_any_order",),
    ),
    "swallows-poison": Defect(
        "what is no message is left out",
        {
            "deliveries.append(self._delivery(taken))": "deliveries += filter(_is_one, [self._delivery(taken)])",
            "def _hex(": "def _is_one(delivery):\n    return delivery.message\n\n\ndef _hex(",
        },
        ("test_what_is_no_message_is_set_aside_and_its_neighbours_are_done",),
    ),
    "returns-too-many": Defect(
        "it returns all that is there",
        {"if len(deliveries) == messages_max:": "if len(deliveries) == 10_000:"},
        ("test_no_more_than_asked_for",),
    ),
    "extends-nothing": Defect(
        "its leases end while handlers run",
        {"self._extend(delivery.tag)": "self._extend"},
        (_SLOW, _AWAY),
    ),
    "decodes-payloads": Defect(
        "the payload is what could be decoded of it",
        {"topic, payload, headers": 'topic, payload.decode(errors="ignore").encode(), headers'},
        ("test_payloads_stay_bytes",),
    ),
}
PUBLISHERS = {
    "forgets-order": Defect(
        "a file's place is a random number",
        {'f"{self._last:020d}-{secrets.token_hex(3)}"': "secrets.token_hex(13)"},
        ("test_thousands_in_one_call_arrive_in_the_order_of_their_keys",),
    ),
    "confirms-a-buffer": Defect(
        "it writes when it is closed, and confirms at once",
        {
            "self._write(directory, content)\n": "vars(self).setdefault('late', []).append((directory, content))\n",
            '"""Nothing is open between two calls."""': "[self._write(*each) for each in vars(self).get('late', ())]",
        },
        ("test_what_a_killed_process_saw_confirmed_is_there",),
    ),
    "confirms-a-missing-topic": Defect(
        "what has no directory is confirmed",
        {'DestinationRefused(f"There is no directory {directory}.")': "None"},
        ("test_a_topic_that_takes_nothing_fails_its_message_alone",),
    ),
    "refuses-neighbours": Defect(
        "one message that is too large fails the call",
        {'raise MessageRefused(f"The message has': 'raise BrokerUnavailable(f"The message has'},
        ("test_what_is_too_large_is_refused_and_its_neighbours_are_not",),
    ),
}
DEFECTS = {**SOURCES, **PUBLISHERS}


class DefectRig(_EXAMPLE.SpoolRig):  # type: ignore[misc]  # of an example, without types
    """With the `spool.py` that lies beside its topic, in other processes too."""

    def source(self, **options: Any) -> Any:
        spec = spec_from_file_location("wrong_spool", Path(self.address, "spool.py"))
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.Spool(self.address, **options)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "defect" not in metafunc.fixturenames:
        return
    name = metafunc.function.__name__
    assert metafunc.cls is not None
    for_sources = issubclass(metafunc.cls, SourceConformance)
    metafunc.parametrize(
        "defect",
        [
            pytest.param(key, marks=() if defect.points[0] == name else pytest.mark.slow)
            for key, defect in (SOURCES if for_sources else PUBLISHERS).items()
        ],
    )


class _Wrong:
    @pytest.fixture
    def rig(
        self,
        defect: str,
        tmp_path: Path,
        request: pytest.FixtureRequest,
        monkeypatch: pytest.MonkeyPatch,
    ) -> Iterator[Rig]:
        wrong = DEFECTS[defect]
        (tmp_path / "spool.py").write_text(wrong.applied())
        if request.function.__name__ in wrong.points:
            raised = AssertionError, FileNotFoundError, BrokerUnavailable
            # before the first acknowledgement all may be committed: then whoever acknowledged sooner has lost nothing
            late = request.node.callspec.params.get("crash") == "before:ack"
            request.applymarker(
                pytest.mark.xfail(reason=wrong.does, strict=not late, raises=raised)
            )
            monkeypatch.setattr(brokers, "DEADLINE_S", 1.5)
        with DefectRig(str(tmp_path)) as rig:
            yield rig


class TestWrongSources(_Wrong, SourceConformance):
    pass


class TestWrongPublishers(_Wrong, PublisherConformance):
    many = 100


def test_the_page_is_the_example_and_shows_its_defects() -> None:
    assert len(TEXT.splitlines()) < 200
    typed = "".join(block.text for block in PAGE.blocks() if block.language == "python")
    files = TEXT + (EXAMPLES / "pytest_spool.py").read_text()
    assert typed.split() == files.split()
    for wrong in DEFECTS.values():
        points = ", ".join(f"`{name}`" for name in wrong.points)
        assert f"| {wrong.does} | {points} |" in PAGE.text
    for name, what in brokers.CAPABILITIES.items():
        assert f"| `{name}` | {what} |" in PAGE.text


def test_a_rig_cannot_lack_what_nobody_knows() -> None:
    with pytest.raises(TypeError, match="sever is none of native ids"):
        type("Wrong", (Rig,), {"lacks": {"sever": "misspelt"}})


def test_every_point_says_which_promise_it_is_about_and_what_to_do() -> None:
    promises = re.findall(
        r"^\| (\d+\.\d+) \|", (ROOT / "docs/reliability/promises.md").read_text(), re.MULTILINE
    )
    for suite in (SourceConformance, PublisherConformance):
        points = {name: test for name, test in vars(suite).items() if name.startswith("test_")}
        assert len(points) > 10
        for name, test in points.items():
            promise = test.promise
            if promise not in promises:
                kind, method = promise.split(".")
                assert getattr(getattr(base, kind), method).__doc__, promise
            assert len(test.__doc__ or "") > 60, name
