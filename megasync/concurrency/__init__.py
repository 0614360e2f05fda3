"""Threads for synchronous user functions, backoff, and helpers for tasks and process pools. Runs no loop of its own."""
