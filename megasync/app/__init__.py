"""Builds a run or an evaluation from a configuration and shuts it down. `AsyncTrainer` is the Python entry point."""
