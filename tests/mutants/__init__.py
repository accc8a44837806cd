"""Deliberate defects of txbox, one at a time in a copy, and what notices each: `python -m tests.mutants`."""
