"""Threads for synchronous user functions, backoff, and helpers for tasks and process pools. Owns no event loop."""
