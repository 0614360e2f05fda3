"""A single turn, scored by two rewards and measured by a metric."""

import verifiers.v1 as vf

WORDS = ("abc", "hello", "x")


class ReverseData(vf.TaskData):
    answer: str = ""


class ReverseTask(vf.Task[ReverseData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def same(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.5)
    async def brief(self, trace) -> float:
        if trace.last_reply == "broken":
            raise KeyError("a grader's mistake")
        return float("nan") if trace.last_reply == "nan" else float(len(trace.last_reply) < 10)

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class ReverseTaskset(vf.Taskset[ReverseTask, vf.TasksetConfig]):
    def load(self):
        print("a taskset may print")
        for word in WORDS:
            data = ReverseData(prompt=f"Reverse: {word}", answer=word[::-1], name=word)
            yield ReverseTask(data, self.config.task)


__all__ = ["ReverseTaskset"]
