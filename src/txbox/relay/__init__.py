"""The relay: staged messages leave the outbox."""

from txbox.relay.relay import Relay as Relay
from txbox.relay.relay import relays as relays

__all__ = ["Relay", "relays"]
