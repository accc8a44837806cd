"""The shop, for every test here."""

from tests.shop import shop

__all__ = ["shop"]
