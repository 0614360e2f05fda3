"""Held-out sets: answers to them, their scores, and how those are shown."""
