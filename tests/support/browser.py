"""A browser for the dashboard: the system's Chromium, and axe-core, which finds what keeps people out of a page.

`python -m tests.support.browser` gets both: as root on Debian Chromium is installed, and npm fetches axe-core once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.support.servers import UnavailableError, packages

_AXE = "4.14.1"
_AXE_SHA256 = "e6b0ce02b84d892e2e33e403485e7f3d6c29e2be6df65daf44d89ba564139745"
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def chromium() -> str | None:
    """Where Chromium is; None when it is not here."""
    return next((found for name in _PROGRAMS if (found := shutil.which(name))), None)


def axe() -> Path:
    """Where the script of axe-core is, or will be."""
    return Path(f"/var/tmp/txbox-packages-{os.getuid()}/axe-core-{_AXE}.js")


def missing() -> str | None:
    """None, or one sentence that says what to do."""
    if chromium() is None or not axe().exists():
        return "Chromium or axe-core is not here: run `make test-ui`, which gets both"
    return None


def get() -> None:
    """Get what is missing.

    Raises:
        UnavailableError: it cannot be had.
    """
    if chromium() is None:
        if not packages.may_install():
            raise UnavailableError(
                "Chromium is missing: install it, for example with apt-get install chromium"
            )
        packages.install(("chromium", "fonts-dejavu-core"))
    if not axe().exists():
        _fetch_axe()


def _fetch_axe() -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise UnavailableError("npm is missing: install it to fetch axe-core")
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(
            [npm, "pack", f"axe-core@{_AXE}"],
            cwd=directory,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise UnavailableError(
                f"npm pack axe-core failed: {done.stderr.strip().splitlines()[-1:]}"
            )
        (archive,) = Path(directory).glob("*.tgz")
        if hashlib.sha256(archive.read_bytes()).hexdigest() != _AXE_SHA256:
            raise UnavailableError("axe-core is not the file that it should be")
        with tarfile.open(archive) as packed:
            script = packed.extractfile("package/axe.min.js")
            assert script is not None
            axe().parent.mkdir(parents=True, exist_ok=True)
            fetched = axe().with_suffix(f".{os.getpid()}")
            fetched.write_bytes(script.read())
            fetched.replace(axe())


if __name__ == "__main__":
    try:
        get()
    except UnavailableError as error:
        sys.exit(str(error))
