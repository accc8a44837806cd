"""Measures txbox on a PostgreSQL server beside the textbook loop and the limit; `txbox bench`.

Needs txbox[postgresql].
"""
