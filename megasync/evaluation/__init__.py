"""Held-out sets: the answers to them, their scores, and how those are shown."""
