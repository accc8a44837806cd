"""Installs what is missing from Debian's packages, without starting the distribution's services."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers import (
    UnavailableError,
    elasticmq,
    java,
    kafka,
    mariadb,
    mysql,
    nats,
    postgresql,
    rabbitmq,
    redis,
)
from tests.support.servers.process import file_lock

POLICY = Path("/usr/sbin/policy-rc.d")
_LOCK = Path("/var/tmp/txbox-install.lock")

# From Maven, not from packages: these need Java only.
POMS = {"kafka": kafka.POM, "sqs": elasticmq.POM}

# Fetched once, by any user.
FETCH: Mapping[str, Callable[[], bool]] = {
    "kafka": kafka.fetch,
    "sqs": elasticmq.fetch,
    "mysql": mysql.fetch,
}

_PACKAGES_OF = {
    "postgresql": ("postgresql",),
    "mariadb": ("mariadb-server",),
    "pgbouncer": ("pgbouncer",),
    "postgresql-durable": ("postgresql",),
    "mariadb-durable": ("mariadb-server",),
    "rabbitmq": ("rabbitmq-server",),
    "redis": ("redis-server",),
    "nats": ("nats-server",),
    "kafka": ("default-jre-headless", "maven"),
    "sqs": ("default-jre-headless", "maven"),
}
_PROGRAM_OF = {
    "postgresql": postgresql.binaries,
    "mariadb": mariadb.binary,
    "pgbouncer": postgresql.pgbouncer_binary,
    "postgresql-durable": postgresql.binaries,
    "mariadb-durable": mariadb.binary,
    "rabbitmq": rabbitmq.binary,
    "redis": redis.binary,
    "nats": nats.binary,
}


def installed(server: str) -> bool:
    """True when this server's programs are on the machine, or can be fetched without root."""
    if server in POMS:
        return java.ready(POMS[server])
    if server in FETCH:
        return True  # or the sentence of its fetching says why not
    return _PROGRAM_OF[server]() is not None


def missing(servers: Sequence[str]) -> list[str]:
    """Names of the packages that these servers need and that are not installed."""
    wanted = (package for name in servers if not installed(name) for package in _PACKAGES_OF[name])
    return list(dict.fromkeys(wanted))


def what_is_missing(server: str) -> str:
    """What the sentence about a server that cannot run here begins with."""
    if server not in POMS:
        return f"{server}: not here"
    if java.java() is None:
        return f"{server}: Java {java.OLDEST_JAVA} or newer is missing"
    return f"{server}: Maven is missing"


def may_install() -> bool:
    """True as root on Debian or a relative of it."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: Sequence[str]) -> None:
    """Install these packages; see `may_install`."""
    # another checkout that ended first would take the answer away, and Debian start the rest
    with file_lock(_LOCK), _services_stay_stopped():
        _apt("update")
        _apt("install", "--yes", "--no-install-recommends", *packages)
    java.java.cache_clear()


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
        raise UnavailableError(f"apt-get {' '.join(arguments)} failed: {' '.join(reason)}")


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
