"""Sandboxes: places where commands that a model wrote run with limits, and from which nothing is left."""

from megasync.sandboxes.protocol import Limits, Result, Sandbox, Snapshot, Spec, Starter

__all__ = ["Limits", "Result", "Sandbox", "Snapshot", "Spec", "Starter"]
