"""Joins experiment trackers: sinks for a run's metrics."""
