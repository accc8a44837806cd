"""A delivery platform: scanners report where packages are, and their receivers get mail about it."""
