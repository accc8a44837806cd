"""Both services in one App on one database, without a broker; `txbox run delivery_platform.monolith:app`."""

from __future__ import annotations

from delivery_platform import notifications, scans

app = scans.app
if app is not notifications.app:
    raise SystemExit("PLATFORM_BROKER is set: run the two services, each by itself.")
