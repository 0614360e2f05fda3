"""`python -m megasync` is the `megasync` command."""

from megasync.cli.commands import main

main()
