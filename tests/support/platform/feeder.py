"""`python -m tests.support.platform.feeder PACKAGES PARTS PAUSE_S`: the scanners of the example, over some time.

With `once` behind it: each scan once and in order, as in a perfect world.
"""

from __future__ import annotations

import sys
import time

from delivery_platform.scanners import publish, scans  # type: ignore[import-not-found]  # of examples/


def main() -> None:
    packages, parts, pause_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    messages = scans(packages)
    if sys.argv[4:] == ["once"]:
        once = {message.payload: message for message in messages}
        messages = sorted(once.values(), key=lambda message: int(message.json()["scan_id"]))
    size = -(-len(messages) // parts)
    for start in range(0, len(messages), size):
        publish(messages[start : start + size])
        time.sleep(pause_s)


if __name__ == "__main__":
    main()
