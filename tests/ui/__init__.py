"""The dashboard: what it shows, who may do what, and that nothing of a message gets out of its cell."""
