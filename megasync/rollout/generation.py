"""The result of a generation: tokens, each with its log-prob and the weight version that sampled it.

The generations of a conversation form lines: the prompt of a generation begins with all tokens of its `parent`, prompt
and response. Invariant: in the trajectory of a line exactly the sampled tokens are trained, each with the log-prob and
version of its own generation. Tokens between two generations (tool output, template text) have a loss mask of 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasync.rollout.tokens import Tokens
from megasync.trajectory import ROUTES, SUPPORT, SUPPORT_SIZES, TOKEN_REWARDS, Trajectory
from megasync.trajectory.runs import FloatArray, Runs, float_array
from megasync.trajectory.support import Support
from megasync.trajectory.turns import ANSWER, Call, Turn


class Generation:
    """One response to one prompt.

    `tokens` are those of prompt and response, to be continued by the next prompt: `generation.tokens + observation`.
    `prompt_ids`, `token_ids`, `logprobs` and `versions` are new lists with every access. `finish_reason` is "stop" or
    "length". `parts` is the number of requests: 1, plus one for each interruption. `parent` is the earlier generation
    that this one continues, which the conversation sets. A chat notes the turns that its messages `added` to the
    parent, counted from the first token of the prompt, and the tool `calls` of the answer.
    """

    __slots__ = (
        "_logprobs", "_spans", "added", "calls", "finish_reason", "parent", "parts", "prompt", "support", "text",
        "tokens",
    )  # fmt: skip

    def __init__(
        self,
        prompt_ids: Sequence[int],
        token_ids: Sequence[int] | NDArray[Any],
        logprobs: Sequence[float] | NDArray[Any],
        versions: Sequence[int],
        finish_reason: str,
        text: str = "",
        parts: int = 1,
        support: Support | None = None,
    ) -> None:
        """`logprobs` are natural logarithms of probabilities at the sampling temperature, kept as float32.

        `support` is what truncated sampling left to choose each token from, over which the probabilities are.
        """
        self.prompt = Tokens.of(prompt_ids)
        self.tokens = self.prompt + token_ids
        self._logprobs: FloatArray = float_array(logprobs)
        # (version, number of tokens), in the order of the tokens.
        self._spans = Runs.of(versions).spans()
        self.finish_reason = finish_reason
        self.text = text
        self.parts = parts
        self.support = support
        self.parent: Generation | None = None
        self.added: tuple[Turn, ...] = ()
        self.calls: tuple[Call, ...] = ()

    @property
    def prompt_ids(self) -> list[int]:
        return self.prompt[:]

    @property
    def token_ids(self) -> list[int]:
        """The ids of the sampled tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def logprobs(self) -> list[float]:
        """One log-prob per sampled token, at the sampling temperature."""
        return self._logprobs.tolist()

    @property
    def versions(self) -> list[int]:
        """The weight version that sampled each token."""
        return list(Runs.of_spans(self._spans))

    @property
    def newest_version(self) -> int | None:
        """The weight version that sampled the last token; None without tokens."""
        return self._spans[-1][0] if self._spans else None

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(version, number of sampled tokens), in the order of the tokens."""
        return list(self._spans)

    def line(self) -> list[Generation]:
        """Return this generation and its ancestors, oldest first."""
        line, at = [], self
        while at is not None:
            line.append(at)
            at = at.parent
        return line[::-1]

    def trajectory(
        self,
        reward: float | None = None,
        *,
        text: str | None = None,
        metrics: dict[str, float] | None = None,
        untrained: Collection[Generation] = (),
        turn_rewards: Mapping[Generation, float] | None = None,
    ) -> Trajectory:
        """Return the whole line as one trajectory.

        A reward function receives `text`, by default the text of this generation. The tokens of `untrained` generations
        get a loss mask of 0, because another trajectory trains them. ``turn_rewards`` are those of single generations,
        given at their last tokens; they are parts of the reward.
        """
        line = self.line()
        prompt = len(line[0].prompt)
        response = self.tokens.array[prompt:]
        logprobs = np.zeros(response.size, np.float32)
        masks: list[tuple[int, int]] = []
        versions: list[tuple[int, int]] = []
        supports: list[Support] = []
        at = 0
        for generation in line:
            start, end = len(generation.prompt) - prompt, len(generation.tokens) - prompt
            logprobs[start:end] = generation._logprobs
            # Tokens between generations were not sampled. Their versions only fill the gap and are never read.
            masks += [(0, start - at), (int(generation not in untrained), end - start)]
            versions += [(versions[-1][0] if versions else 0, start - at), *generation._spans]
            supports += [Support.whole(start - at), generation.support or Support.whole(end - start)]
            at = end
        arrays: dict[str, NDArray[Any]] = {}
        if any(generation.support is not None for generation in line):
            support = Support.join(supports)
            arrays |= {SUPPORT_SIZES: support.sizes, SUPPORT: support.ids}
        if turn_rewards:
            arrays[TOKEN_REWARDS] = rewards = np.full(response.size, np.nan, np.float32)
            for generation in line:
                if generation in turn_rewards and generation not in untrained and len(generation.token_ids):
                    rewards[len(generation.tokens) - prompt - 1] = turn_rewards[generation]
        turns = list(self._turns(line))
        if self.tokens.routes is not None:
            arrays[ROUTES] = self.tokens.routes
        # An array that nobody can change is taken as it is.
        logprobs.flags.writeable = False
        return Trajectory(
            prompt_ids=line[0].prompt.array,
            response_ids=response,
            loss_mask=Runs.of_spans(masks),
            logprobs=logprobs,
            versions=Runs.of_spans(versions),
            finish_reason=self.finish_reason,
            text=self.text if text is None else text,
            reward=reward,
            metrics=dict(metrics or {}),
            arrays=arrays,
            # One answer without a call says nothing that the loss mask does not.
            turns=turns if len(turns) > 1 or self.calls else (),
        )

    def _turns(self, line: Sequence[Generation]) -> Iterator[Turn]:
        """The turns of a line behind its prompt, in order, which together have all of its tokens."""
        prompt = at = len(line[0].prompt)
        for generation in line:
            start, end = len(generation.prompt), len(generation.tokens)
            between = [turn for turn in generation.added if at <= turn.start]
            complete = bool(between) and (between[0].start, between[-1].end) == (at, start)
            if at < start:
                yield from (turn.moved(-prompt) for turn in (between if complete else [Turn(at, start)]))
            if start < end:
                yield Turn(start - prompt, end - prompt, ANSWER, calls=generation.calls)
            at = end
