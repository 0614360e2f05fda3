"""A workflow whose process exits at one prompt, in a module that other processes can also import."""

import os
import subprocess
import sys

from megasync.rollout.workflow import single_turn

# The environment variable with that prompt.
PROMPT = "DEADLY_PROMPT"
# What the process leaves behind there, in a session of its own.
LEFT_BEHIND = [sys.executable, "-c", "import time; time.sleep(600)", "left-behind"]


async def rollout(client, sample):
    if sample["prompt"] == os.environ[PROMPT]:
        subprocess.Popen(LEFT_BEHIND, start_new_session=True)  # noqa: ASYNC220 - as a user's code might
        os._exit(3)
    return await single_turn(client, sample)
