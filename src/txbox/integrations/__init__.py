"""Frameworks that txbox runs in: one module each, which needs that framework and nothing of the others."""
