"""A game with a state: the environment answers each move until the sum of the moves is the goal."""

import itertools

import verifiers.v1 as vf


class CountData(vf.TaskData):
    goal: int = 0


class CountTask(vf.Task[CountData, vf.State, vf.TaskConfig]):
    pass


class CountEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CountEnv(vf.Env[CountEnvConfig]):
    async def run(self, task, agents):
        total = 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                total += int(segment.last_reply)
                if total >= task.data.goal:
                    break
                segment = await interaction.turn(f"{total} of {task.data.goal}")
        interaction.trace.record_reward("exact", float(total == task.data.goal))
        interaction.trace.record_metric("total", float(total))


class CountConfig(vf.TasksetConfig):
    first: int = 5


class CountTaskset(vf.Taskset[CountTask, CountConfig]):
    INFINITE = True

    def load(self):
        for goal in itertools.count(self.config.first):
            yield CountTask(CountData(prompt=f"Count to {goal}", goal=goal), self.config.task)


__all__ = ["CountEnv", "CountTaskset"]
