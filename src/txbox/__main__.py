"""`python -m txbox` is `txbox`."""

import sys

from txbox.cli import main

sys.exit(main())
