"""What is published: the wheel, the sdist and the index page are built, looked at and installed.

`make dist` gives its own files in TXBOX_DIST; otherwise they are built here, without a network.
"""

from __future__ import annotations

import email
import email.message
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_NAME = f"txbox-{_PROJECT['version']}"
#: Of the wheel without the dashboard: 655 kB on 23 November 2026, and 689 kB on the 26th, with the faults by kind (what
#: a handler sets, boundaries, sessions, findings). Python alone was 511 kB of 638, and 360 kB without docstrings and
#: comments, which belong there; SQL is 73 kB, what a wheel says of itself 20 kB. On the 28th, with `txbox
#: encrypt`, what frameworks and sessions leave behind, and the proof of handlers, it may be 745; with the kit of the
#: contract (12 kB) and HTTP requests once (15 kB, five frameworks) 776. Less takes less code.
_LARGEST_BYTES = 832_000
_LINK = re.compile(r"\]\(([^)\s]+)\)")

_FIRST_MESSAGE = """
import sqlite3, sys
from txbox import App, Message, Outcome

with App("sqlite:///shop.db") as app:
    app.init()

    @app.handler("orders", consumer="billing")
    def bill(message: Message[dict], tx: sqlite3.Connection) -> None:
        tx.execute("CREATE TABLE paid (id)")

    paid = Message(id="1", topic="orders", payload=b"{}")
    assert [app.process(paid), app.process(paid)] == [Outcome.PROCESSED, Outcome.DUPLICATE]
assert sys.prefix in sys.modules["txbox"].__file__
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory with the wheel and the sdist."""
    if given := os.environ.get("TXBOX_DIST"):
        return Path(given)
    made = tmp_path_factory.mktemp("dist")
    hatchling = Path(sys.executable).with_name("hatchling")
    _run(hatchling, "build", "-d", made, cwd=ROOT)
    return made


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / f"{_NAME}-py3-none-any.whl"


@pytest.fixture(scope="module")
def sdist(dist: Path) -> Path:
    return dist / f"{_NAME}.tar.gz"


def _run(
    *argv: str | Path, cwd: Path, env: dict[str, str] | None = None, timeout_s: int = 200
) -> str:
    words = [str(word) for word in argv]
    done = subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _tools_path() -> str:
    """The PATH with the uv that `make dev` has found or installed."""
    return f"{ROOT / '.tools/bin'}{os.pathsep}{os.environ['PATH']}"


def _uv() -> str:
    found = shutil.which("uv", path=_tools_path())
    assert found, "uv is neither on the PATH nor in .tools: run `make dev`"
    return found


def _restore_certificates(environment: dict[str, str]) -> None:
    """Undo what tests/conftest.py does: the network is meant."""
    environment["SSL_CERT_FILE"] = os.environ["TXBOX_TEST_CERTIFICATES"]
    if not environment["SSL_CERT_FILE"]:
        del environment["SSL_CERT_FILE"]


def _environment(directory: Path, *, network: bool = False) -> dict[str, str]:
    """No setting, cache or package of whoever runs the tests."""
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(directory), "LC_ALL": "C.UTF-8", "UV_NO_CONFIG": "1",
    }  # fmt: skip
    kept = ("SSL_", "UV_", "PIP_", "HTTP", "http", "NO_PROXY", "no_proxy")
    if network:
        environment |= {name: value for name, value in os.environ.items() if name.startswith(kept)}
        _restore_certificates(environment)
    else:
        environment["UV_OFFLINE"] = "1"
    return environment


def _members(sdist: Path) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(sdist) as archive:
        return {
            member.name.removeprefix(f"{_NAME}/"): member
            for member in archive.getmembers()
            if member.isfile()
        }


def _metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        return email.message_from_bytes(archive.read(f"{_NAME}.dist-info/METADATA"))


def _tracked() -> set[str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = _run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    return {name for name in listed if name and (ROOT / name).is_file()}


def test_the_wheel_is_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        found = archive.infolist()
    inside = {member.filename for member in found}
    about = {name for name in inside if name.startswith(f"{_NAME}.dist-info/")}
    source = ROOT / "src"
    package = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside - about == package
    assert {
        "txbox/py.typed",
        "txbox/store/common.sql",
        "txbox/store/postgresql.sql",
        "txbox/ui/templates/base.html",
    } <= inside
    assert {name.partition("/")[2] for name in about} == {
        "METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE",
    }  # fmt: skip
    dashboard = sum(
        member.compress_size for member in found if member.filename.startswith("txbox/ui/")
    )
    assert wheel.stat().st_size - dashboard < _LARGEST_BYTES


def test_the_sdist_is_the_repository(sdist: Path) -> None:
    inside = _members(sdist)
    tracked = _tracked()
    assert tracked - set(inside) == set()
    beside = set(inside) - tracked - {"PKG-INFO"}
    if "TXBOX_DIST" in os.environ:  # of a developer's tree it has new files, too
        assert beside == set()
    assert [name for name in beside if name.startswith((".venv/", ".tools/", "dist/"))] == []
    assert inside[".ci/sync"].mode & 0o111, "`make dev` runs it"


def test_links_of_the_index_page_lead_to_files_of_this_release(wheel: Path, sdist: Path) -> None:
    page = _metadata(wheel).get_payload()
    assert isinstance(page, str)
    below = f"{_PROJECT['urls']['Source']}/blob/v{_PROJECT['version']}/"
    links = set(_LINK.findall(page))
    assert {link for link in links if "://" not in link} == set()
    ours = {link.removeprefix(below).partition("#")[0] for link in links if link.startswith(below)}
    files = set(_members(sdist))
    folders = {str(parent) for name in files for parent in Path(name).parents}
    assert len(ours) > 10
    assert ours - files - folders == set()


def test_the_wheel_says_what_it_is_and_needs(wheel: Path) -> None:
    metadata = _metadata(wheel)
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra", ())) == set(_PROJECT["optional-dependencies"])
    core = [each for each in metadata.get_all("Requires-Dist", ()) if "extra ==" not in each]
    assert core == []


def test_the_newest_changes_are_of_this_version() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", changes, re.MULTILINE)
    assert newest is not None
    assert newest[1] in (_PROJECT["version"], "Unreleased")


def test_it_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = _environment(tmp_path)
    empty = tmp_path / "empty"
    _run(_uv(), "venv", "--quiet", "--python", sys.executable, empty, cwd=tmp_path, env=environment)
    python = empty / "bin/python"
    _run(
        _uv(), "pip", "install", "--quiet", "--no-index", "--python", python, wheel,
        cwd=tmp_path, env=environment,
    )  # fmt: skip
    for command in ([empty / "bin/txbox"], [python, "-m", "txbox"]):
        said = _run(*command, "--version", cwd=tmp_path, env=environment)
        assert said == f"txbox {_PROJECT['version']}\n"
    _run(python, "-I", "-W", "error", "-c", _FIRST_MESSAGE, cwd=tmp_path, env=environment)
    listed = _run(
        python, "-m", "txbox", "list", "--database", "sqlite:///shop.db",
        cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert "processed" in listed


@pytest.mark.slow
def test_uvx_runs_the_demo_with_the_published_extras(wheel: Path, tmp_path: Path) -> None:
    environment = _environment(tmp_path, network=True)
    shown = _run(
        _uv(), "tool", "run", "--from", f"txbox[cli,sqlite] @ {wheel.resolve().as_uri()}", "txbox", "demo",
        cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert "txbox: every customer was charged once" in shown


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_unpacked_sdist_checks_and_tests_itself(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / _NAME
    environment = {
        **os.environ, "PATH": _tools_path(), "TXBOX_TEST_DATABASES": "sqlite", "CI": "",
        "TXBOX_REQUIRE_SERVERS": "",
    }  # fmt: skip
    _restore_certificates(environment)
    for variable in ("TXBOX_DIST", "VIRTUAL_ENV", "PYTEST_ADDOPTS"):
        environment.pop(variable, None)
    _run("make", "check", cwd=unpacked, env=environment, timeout_s=1800)
    # every test file is imported, and these run: what they need beside the source is there
    _run(
        unpacked / ".venv/bin/pytest", "-q", "--collect-only",
        cwd=unpacked, env=environment, timeout_s=1800,
    )  # fmt: skip
    _run(
        unpacked / ".venv/bin/pytest", "-q", "-n", "2", "tests/unit", "tests/docs", "tests/test_message.py",
        cwd=unpacked, env=environment, timeout_s=1800,
    )  # fmt: skip
