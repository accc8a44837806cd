"""Installs what is missing from Debian's packages, without starting the distribution's services."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.servers import ServerError, mariadb, postgresql

POLICY = Path("/usr/sbin/policy-rc.d")


def missing(servers: Sequence[str]) -> list[str]:
    """Names of the packages that these servers need and that are not installed."""
    present = {
        "postgresql": postgresql.binaries,
        "mariadb-server": mariadb.binary,
        "pgbouncer": postgresql.pgbouncer_binary,
    }
    package_of = {
        "postgresql": "postgresql",
        "mariadb": "mariadb-server",
        "pgbouncer": "pgbouncer",
        "postgresql-durable": "postgresql",
        "mariadb-durable": "mariadb-server",
    }
    wanted = dict.fromkeys(package_of[name] for name in servers)
    return [package for package in wanted if not present[package]()]


def install(packages: Sequence[str]) -> None:
    """Install these packages; needs root on Debian or a relative of it."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ServerError(
            f"{', '.join(packages)} not found: start Docker, install them, run as root on Debian, "
            "or set the TXBOX_TEST_*_URL variables"
        )
    with _services_stay_stopped():
        _apt("update")
        _apt("install", "--yes", "--no-install-recommends", *packages)


def _apt(*arguments: str) -> None:
    done = subprocess.run(
        ["apt-get", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise ServerError(f"apt-get {' '.join(arguments)} failed: {' '.join(reason)}")


@contextmanager
def _services_stay_stopped() -> Iterator[None]:
    """Debian asks policy-rc.d before a package starts its service; 101 means no."""
    if POLICY.exists():  # the administrator's own answer stands
        yield
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
