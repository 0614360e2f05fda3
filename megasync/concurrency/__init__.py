"""Threads, worker processes and backoff: what code that waits for other code needs, without a loop of its own."""
