"""Finding what runs in sandboxes of this process."""

import os

from processes import command_line, family, with_word

WORDS = ("sandbox_child.py", "program.py", "link.py")


def of_sandboxes(folder):
    """Processes below this one, and what may have left it but works in the folder of sandboxes."""
    below = [p for p in family(os.getpid())[1:] if any(word in command_line(p) for word in WORDS)]
    return [*below, *with_word(str(folder))]
