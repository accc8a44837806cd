"""One message or batch, from its arrival to its outcome."""
