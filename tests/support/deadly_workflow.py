"""A workflow whose process exits at one prompt, in a module that other processes can also import."""

import os
import subprocess
import sys

from megasync.rollout.workflow import single_turn

# The environment variable with that prompt.
PROMPT = "DEADLY_PROMPT"
# The one with a word in the command line of the program that the process leaves behind there.
WORD = "DEADLY_WORD"


async def rollout(client, sample):
    if sample["prompt"] == os.environ[PROMPT]:
        program = [sys.executable, "-c", "import time; time.sleep(600)", os.environ[WORD]]
        subprocess.Popen(program, start_new_session=True)  # noqa: ASYNC220 - as a user's code might
        os._exit(3)
    return await single_turn(client, sample)
