"""One guess finds what guards a file: tests mirror the source, and what has no file of its own is named here."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import ROOT

SOURCE, TESTS = ROOT / "src/txbox", ROOT / "tests"
#: What is tested as a whole, or is about no module: see CONTRIBUTING.
BESIDE = (
    "benchmarks",
    "chaos",
    "crash",
    "demo",
    "docs",
    "examples",
    "fuzz",
    "models",
    "mutants",
    "release",
    "scenarios",
    "support",
    "unit",
)
#: The ground the others stand on.
GROUND = "environment"
LARGE = 100  # lines; what is smaller is guarded by its caller's test
#: What fails when one of these breaks; the reader's first guess would have been another file.
ELSEWHERE = {
    "admin/facts": "admin/test_explain.py",
    "admin/reader": "admin/test_admin.py",
    "admin/replay": "admin/test_admin.py",
    "admin/tables": "cli/test_cli_commands.py",
    "admin/views": "cli/test_cli_commands.py",
    "brokers/facts": "admin/test_doctor_brokers.py",
    "cli/change": "cli/test_cli_commands.py",
    "cli/rehearse": "admin/test_comparison.py",
    "errors": "connections/test_base_errors.py",
    "events": "observers/test_logging.py",
    "integrations/django/views": "integrations/test_requests.py",
    "observers/activity": "worker/test_pulse.py",
    "observers/pauses": "worker/test_pulse_pauses.py",
    "store/inbox": "processing/test_intake.py",
    "store/jobs": "maintenance/test_maintenance.py",
    "store/outbox": "worker/test_relay.py",
    "testing/recording": "testing/test_proof.py",
    "ui/changes": "ui/test_pages.py",
    "ui/render": "ui/test_pages.py",
    "ui/security": "ui/test_ui_access.py",
    "worker/driving": "worker/test_worker.py",
}


def _names(folder: Path) -> set[str]:
    """What a test of this package may be called after: its modules and packages, and itself."""
    inside = {
        path.stem for path in folder.iterdir() if path.suffix in {".py", ".sql"} or path.is_dir()
    }
    return inside | {folder.name}


def _tests() -> list[Path]:
    found = (path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
    return sorted(path for path in found if path.parts[0] not in BESIDE)


def _is_of(test: Path, name: str) -> bool:
    subject = test.stem.removeprefix("test_")
    return subject == name or subject.startswith(f"{name}_")


def test_every_test_is_called_after_what_it_guards() -> None:
    lost = [
        str(test)
        for test in _tests()
        if not any(_is_of(test, name) for name in _names(SOURCE / test.parent))
        and not _is_of(test, GROUND)
    ]
    assert lost == []


def _guards(module: str) -> list[Path]:
    package, _, name = module.removesuffix("/__init__").removesuffix(".py").partition("/")
    if not name:
        folder = Path(package) if (SOURCE / package).is_dir() else Path()
        return [
            test
            for test in _tests()
            if test.parent == folder and (folder.parts or _is_of(test, package))
        ]
    # a nested package is one subject: brokers/kafka/partitions.py is guarded by test_kafka*.py
    subject = name.partition("/")[0]
    return [test for test in _tests() if test.parent == Path(package) and _is_of(test, subject)]


def test_every_large_module_has_its_test_or_says_where_it_is() -> None:
    modules = {
        str(path.relative_to(SOURCE).with_suffix(""))
        for path in SOURCE.rglob("*.py")
        if len(path.read_text().splitlines()) > LARGE
        and path.relative_to(SOURCE).parts[0] != "demo"
    }
    without = {module for module in modules if not _guards(module)}
    assert without - ELSEWHERE.keys() == set(), "has no test_<module>.py"
    assert {module for module in ELSEWHERE if not (SOURCE / f"{module}.py").is_file()} == set()
    assert {test for test in ELSEWHERE.values() if not (TESTS / test).is_file()} == set()
