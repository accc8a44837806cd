"""Frameworks that txbox runs in: one module each, which needs that one alone; `once` is what task queues share."""
