"""`python -m megasync.install NAME ... [--env DIR]`: what `megasync install` and the scripts in launch/ call."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from megasync.errors import MegasyncError
from megasync.install.environment import make_environment


def main() -> int:
    """Installs the named locks; returns the exit status."""
    parser = argparse.ArgumentParser(prog="megasync install", allow_abbrev=False)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--env", type=Path)
    asked = parser.parse_args()
    # As Ctrl-C: pip is not left behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        make_environment(asked.names, asked.env)
    except MegasyncError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


sys.exit(main())
