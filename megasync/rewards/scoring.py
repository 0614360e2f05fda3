"""Builds the reward runners of a configuration, including those of reward models."""

from __future__ import annotations

from megasync.config import Config
from megasync.config.schema import RewardConfig
from megasync.errors import ConfigError
from megasync.rewards import RewardFunction, RewardRunner, load_reward, reward_functions
from megasync.rewards.function import Given
from megasync.rewards.model_reward import ModelReward, load_model_reward


class Scoring:
    """The reward runners of a run. `models` has the reward models by name; their servers are added later."""

    def __init__(self, config: Config, python_functions: Given | None = None) -> None:
        """`python_functions` are functions passed from Python, which replace those of the configuration.

        Raises ConfigError for a reward that cannot be loaded or would never be used.
        """
        if python_functions is not None and config.reward_models:
            raise ConfigError(
                f"reward= from Python replaces the rewards of the configuration, so its reward_models "
                f"({', '.join(config.reward_models)}) would never be used; remove one of them"
            )
        self._rollout = config.rollout
        self._timeout = config.timeouts.reward
        self.models: dict[str, ModelReward] = {
            name: load_model_reward(name, model, config.timeouts.request)
            for name, model in config.reward_models.items()
        }
        self.named: Given | None = self._named() if python_functions is None else reward_functions(python_functions)
        self._runners: list[tuple[Given | None, RewardRunner]] = []

    def runner(self, functions: Given | None) -> RewardRunner:
        """The runner of these functions. The same object always gets the same runner, so that it shares processes."""
        for runner_functions, runner in self._runners:
            if runner_functions is functions:
                return runner
        runner = RewardRunner(functions, self._rollout.reward_processes, self._timeout)
        self._runners.append((functions, runner))
        return runner

    async def close(self) -> None:
        """Ends the worker processes of all runners."""
        for _, runner in self._runners:
            await runner.close()

    def _named(self) -> Given | None:
        rollout = self._rollout
        if rollout.rewards:
            return [self._function(name, reward) for name, reward in rollout.rewards.items()]
        return load_reward(rollout.reward) if rollout.reward else None

    def _function(self, name: str, reward: RewardConfig) -> RewardFunction:
        call = self.models[reward.model] if reward.model else load_reward(reward.function or name, reward.options)
        return RewardFunction(name, call, reward.weight)
