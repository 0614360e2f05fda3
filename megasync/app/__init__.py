"""Builds a run, or an evaluation, from a configuration, and takes it down again. `AsyncTrainer` is the Python entry point."""
