"""The commands that run it again."""

from __future__ import annotations

import shlex

from megasync.config import CONFIG_FILE, CUSTOM_FILE
from megasync.watch.document import Section, Text, Verbatim
from megasync.watch.run_folder import RunFolder


def reproduction(run: RunFolder) -> Section:
    section = Section("How to reproduce it")
    command = "sft" if run.supervised else "train"
    path = shlex.quote(str(run.path))
    lines = [
        "# the same configuration and seed, in a new run directory",
        f"megasync {command} {shlex.quote(str(run.path / CONFIG_FILE))}",
        "# continue this run from its newest checkpoint",
        f"megasync resume {path}",
    ]
    if not run.supervised:
        lines += ["# score its newest checkpoint", f"megasync eval {path}"]
    lines += ["# look at it, and write this report again", f"megasync watch {path}", f"megasync report {path}"]
    section.add(Verbatim("\n".join(lines), "bash"))
    if custom := run.custom:
        section.add(
            Text(
                f"The run got {', '.join(custom)} from Python ({CUSTOM_FILE}), so it is started by the program that "
                "calls AsyncTrainer, not by these commands."
            )
        )
    return section
