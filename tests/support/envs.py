"""Working and faulty environments, in a module that other processes can also import."""

import asyncio
import os
import time


class Counter:
    """Counts the actions "up". The episode ends at the row's `goal`, with reward 1.0."""

    def __init__(self, refuse=False):
        if refuse:
            raise ValueError("no licence")
        self.count = self.goal = 0
        self.closed = False

    def reset(self, sample):
        self.count, self.goal = 0, sample["goal"]
        return f"0 of {self.goal} in {os.getpid()}"

    def step(self, action):
        if action == "sleep":
            time.sleep(30)
        if action == "raise":
            raise KeyError("rope")
        if action == "odd":
            return "only text"
        if action == "nan":
            return "x", float("nan"), False
        self.count += action == "up"
        return f"{self.count} of {self.goal}", float(self.count == self.goal), self.count == self.goal

    def close(self):
        self.closed = True


class AsyncCounter(Counter):
    async def reset(self, sample):
        return super().reset(sample)

    async def step(self, action):
        if action == "sleep":
            await asyncio.sleep(30)
        return super().step(action)

    async def close(self):
        super().close()


class Halfway:
    def reset(self, sample):
        return ""
