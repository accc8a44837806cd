"""A worker process for one message, which kills itself where its environment says."""

from __future__ import annotations

import sys

from tests.support.ledger import message, service
from txbox import App
from txbox.testing import deliver, install_from_environment

if __name__ == "__main__":
    install_from_environment()
    with service(App(sys.argv[1])) as app:
        deliver(app, message("a"))
