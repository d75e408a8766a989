"""Counters of what was sent, and the writers that report it."""
