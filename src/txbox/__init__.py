"""Transactional inbox and outbox: effectively-once message processing."""
