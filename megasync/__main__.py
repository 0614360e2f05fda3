"""`python -m megasync` is the `megasync` command."""

from megasync.cli import main

main()
