"""A workflow that records which versions sampled its responses, in a module that other processes can also import."""

import json
import os

from megasync.rollout.workflow import single_turn

# The environment variable with the file that gets a line for each response.
FILE = "RECORDED_RESPONSES"


async def rollout(client, sample):
    trajectory = await single_turn(client, sample)
    key = client._routing_key
    with open(os.environ[FILE], "a") as file:  # noqa: ASYNC230 - one short line
        file.write(
            json.dumps({"held_out": key.startswith("eval:"), "versions": sorted(set(trajectory.versions))}) + "\n"
        )
    return trajectory
