"""Finds the processes that run in sandboxes of this process."""

import os

from processes import command_line, family, with_word

WORDS = ("sandbox_child.py", "program.py", "link.py")


def of_sandboxes(folder):
    """Sandbox processes below this one, and processes that name the sandbox folder, even if they are re-parented."""
    below = [p for p in family(os.getpid())[1:] if any(word in command_line(p) for word in WORDS)]
    return [*below, *with_word(str(folder))]
