"""Finds the processes that run in sandboxes of this process."""

import os

import psutil
from processes import command_line, family, with_word

WORDS = ("keeper.py", "program.py", "link.py")


def of_sandboxes(folder):
    """Sandbox processes below this one, and processes that name the sandbox folder, even if they are re-parented.

    The keeper, which stays for the next sandbox, is none of them; the first process of a sandbox has its command line.
    """
    below = [p for p in family(os.getpid())[1:] if any(word in command_line(p) for word in WORDS)]
    return [*(p for p in below if not _keeps(p)), *with_word(str(folder))]


def _keeps(process):
    """Whether a process is a keeper: the child of a process that is neither a keeper nor in a sandbox."""
    try:
        parent = process.parent()
        return "keeper.py" in command_line(process) and (parent is None or "keeper.py" not in command_line(parent))
    except psutil.NoSuchProcess:
        return True
