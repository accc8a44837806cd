"""Message sources and publishers: one file or package per broker. None imports another."""
