"""Sources of messages, one file each."""
