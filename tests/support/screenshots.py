"""The two pictures of the dashboard in the README and the documentation.

`make demo-data DATABASE=…`, and at once `python -m tests.support.screenshots --database …`: the last day is shown.
"""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from tests.support import browser
from tests.support.demo_data import STREAMS
from tests.support.servers import ROOT
from txbox import App
from txbox.ui import Access
from txbox.worker.serving import DASHBOARD, Server

#: By name, the page and how many pixels of it are shown.
PAGES = {"overview": ("/?last=6h", 1050), "consumer": ("/consumer?name=billing&last=24h", 1130)}


def shoot(app: App, folder: Path) -> None:
    """Save a picture of each page."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = Server(app.asgi(lambda _: Access("ann", ["change", "payload"])), listener, DASHBOARD)
    server.start()
    try:
        with sync_playwright() as playwright:
            chromium = playwright.chromium.launch(
                executable_path=browser.chromium(), args=["--no-sandbox"]
            )
            for name, (path, height) in PAGES.items():
                page = chromium.new_page(viewport={"width": 1280, "height": height})
                page.goto(f"http://127.0.0.1:{port}{path}")
                page.screenshot(path=folder / f"{name}.png")
            chromium.close()
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Take the pictures of the dashboard.")
    parser.add_argument("--database", required=True, help="one that `make demo-data` has filled")
    args = parser.parse_args()
    with App(args.database) as app:
        for stream in STREAMS:
            for consumer in stream.consumers:
                app.handler(stream.topic, consumer=consumer)(lambda _message, _tx: None)
        shoot(app, ROOT / "docs" / "screens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
