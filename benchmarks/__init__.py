"""Measured ratios: txbox beside a naive loop, on the same server, in the same run. `make bench`."""
