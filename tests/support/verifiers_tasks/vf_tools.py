"""A task with a tool, on a server of its own that shares the episode's state."""

import verifiers.v1 as vf


class Larder(vf.State):
    looked: int = 0


class LarderTools(vf.Toolset[vf.ToolsetConfig, Larder]):
    TOOL_PREFIX = None

    @vf.tool
    async def look(self, item: str) -> str:
        """Counts an item."""
        self.state.looked += 1
        return {"nut": "4"}.get(item, "none")


class LarderTask(vf.Task[vf.TaskData, Larder, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [LarderTools(vf.ToolsetConfig())]

    @vf.reward
    async def counted(self, trace) -> float:
        return float("4" in trace.last_reply)

    @vf.metric
    async def looked(self, trace) -> float:
        return float(trace.state.looked)


class LarderTaskset(vf.Taskset[LarderTask, vf.TasksetConfig]):
    def load(self):
        yield LarderTask(vf.TaskData(prompt="How many nuts?"), self.config.task)


__all__ = ["LarderTaskset"]
if __name__ == "__main__":
    LarderTools.run()
