"""Joins Harbor: its tasks, and episodes of them in sandboxes."""
