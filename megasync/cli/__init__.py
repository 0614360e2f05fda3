"""The command line. Commands import what they need when they are called, so that `--help` answers at once."""

from megasync.cli.commands import app, main

__all__ = ["app", "main"]
