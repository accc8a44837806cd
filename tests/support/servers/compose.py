"""The servers of compose.yaml, where a Docker engine runs."""

from __future__ import annotations

import shutil
import subprocess

from tests.support.servers import ROOT, ServerError

URLS = {
    "postgresql": "postgresql://txbox:txbox@127.0.0.1:25432/postgres",
    "pgbouncer": "postgresql://txbox:txbox@127.0.0.1:26432/postgres",
    "mariadb": "mysql://root:txbox@127.0.0.1:23306/mysql",
    "mysql": "mysql://root:txbox@127.0.0.1:23307/mysql",
    "rabbitmq": "amqp://guest:guest@127.0.0.1:25772/",
    "redis": "redis://127.0.0.1:26479/0",
    "nats": "nats://127.0.0.1:24322",
    "kafka": "127.0.0.1:29392",
    "sqs": "http://127.0.0.1:29624",
}


def available() -> bool:
    """True when an engine answers and the compose plugin is there; a client alone is not enough."""
    return (
        shutil.which("docker") is not None
        and _docker("info").returncode == 0
        and _docker("compose", "version").returncode == 0
    )


def up(names: list[str]) -> None:
    done = _compose("up", "--detach", "--wait", *names, timeout_s=600)
    if done.returncode:
        raise ServerError(f"docker compose up failed: {done.stderr.strip()[-500:]}")


def pull(names: list[str]) -> None:
    """Fetch the images that are not here; `up` says what went wrong."""
    _compose("pull", "--policy", "missing", *names, timeout_s=900)


def running() -> list[str]:
    """Names of the services that are up already."""
    return _compose("ps", "--services", "--status", "running").stdout.split()


def down(names: list[str] | None) -> None:
    """Stop and delete these services, or all of them."""
    if names is None:
        _compose("down", "--volumes", timeout_s=120)
    else:
        _compose("rm", "--stop", "--force", "--volumes", *names, timeout_s=120)


def _compose(*arguments: str, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    # With its profile on, every command knows the brokers; `up` still starts only what it names.
    return _docker("compose", "--profile", "brokers", *arguments, timeout_s=timeout_s)


def _docker(*arguments: str, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["docker", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(["docker"], 1, "", f"no answer in {timeout_s:.0f} s")
