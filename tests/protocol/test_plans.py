"""What the planner believes of a table must not change what a statement does."""

from __future__ import annotations

from tests.shop import CONSUMER, Shop, opened, paid
from txbox.drive import drive
from txbox.store import leases


def stale(shop: Shop, count: int) -> None:
    """Store messages after the statistics were taken: the planner believes that there is one row."""
    shop.deliver(paid("m0"))
    shop.raw.execute("VACUUM ANALYZE txbox_inbox")
    for number in range(1, count):
        shop.deliver(paid(f"m{number}"))


def test_a_limit_holds_with_stale_statistics(postgresql_url: str) -> None:
    with opened(postgresql_url) as shop:
        shop.handler(mode="stored")
        stale(shop, 12)
        assert len(shop.lease(limit=1)) == 1
        assert len(shop.lease(limit=5)) == 5
        # a row that may kill its process is leased alone
        shop.raw.execute("UPDATE txbox_inbox SET starts = 1 WHERE status = 'pending'")
        assert len(shop.lease(limit=1, suspect=True)) == 1
        shop.raw.execute("UPDATE txbox_inbox SET lease_until = now() WHERE lease_until IS NOT NULL")
        assert shop.app.database.sync is not None
        rescued = leases.rescue(shop.app.store, consumer=CONSUMER, max_starts=3, limit=2)
        assert len(drive(shop.app.database.sync, rescued)) == 2
