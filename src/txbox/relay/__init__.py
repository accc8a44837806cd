"""The relay: sends staged messages from the outbox."""

from txbox.relay.relay import Relay as Relay
from txbox.relay.relay import Relays as Relays

__all__ = ["Relay", "Relays"]
