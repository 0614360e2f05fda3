"""Joins Gymnasium: environments with a discrete action space, such as the toy-text family, played as text.

The observation is the environment's text rendering (`render_mode="ansi"`, with [brackets] in place of colours) if it
has one, otherwise `str(observation)`. The action is the last action name in the model's answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megasync.base.missing import require_extra
from megasync.environments.protocol import Step, episode_seed
from megasync.errors import DataError, raised_as

# Names of the actions 0, 1, ... of Gymnasium's toy-text environments, by id without the version.
ACTIONS = {
    "Blackjack": ("stick", "hit"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "FrozenLake8x8": ("left", "down", "right", "up"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
_COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)


class GymnasiumText:
    """`id` and `options` are passed to `gymnasium.make`; `actions` names the actions of an id not in `ACTIONS`.

    An episode is seeded with the row's `seed` column, or else with a hash of its prompt, so that all episodes of a
    group start in the same state. An answer that names no action costs a turn without a step; the next observation
    lists the actions. Raises DataError for an id or options that Gymnasium rejects.
    """

    def __init__(self, id: str, actions: Sequence[str] | None = None, **options: Any) -> None:
        require_extra("environments", "gymnasium", "the environment gymnasium", kind=DataError)
        import gymnasium

        what = f"gymnasium rejects the environment {id!r} with {options}"
        with raised_as(DataError, what, of=(gymnasium.error.Error, TypeError, AttributeError)):
            printable = "ansi" in _render_modes(gymnasium, id)
            self._env = gymnasium.make(id, render_mode="ansi" if printable else None, **options)
        self._printable = printable
        count = getattr(self._env.action_space, "n", None)
        if count is None:
            raise DataError(
                f"{id} has the actions {self._env.action_space}; only a discrete choice can be played as text"
            )
        names = actions or ACTIONS.get(id.partition("-v")[0]) or [str(number) for number in range(count)]
        if len(names) != count:
            raise DataError(f"{id} has {count} actions, but actions={list(names)} names {len(names)}")
        self._names = [name.lower() for name in names]
        self._pattern = re.compile(rf"\b({'|'.join(map(re.escape, self._names))})\b")

    def reset(self, sample: dict[str, Any]) -> str:
        observation, _ = self._env.reset(seed=episode_seed(sample))
        return f"{self._text(observation)}\n\n{self._choice()}"

    def step(self, action: str) -> Step:
        named = self._pattern.findall(action.lower())
        if not named:
            return Step(f"That names no action. {self._choice()}", 0.0, False)
        number = self._names.index(named[-1]) + int(getattr(self._env.action_space, "start", 0))
        observation, reward, terminated, truncated, _ = self._env.step(number)
        return Step(self._text(observation), float(reward), bool(terminated or truncated))

    def close(self) -> None:
        self._env.close()

    def _text(self, observation: Any) -> str:
        printed = self._env.render() if self._printable else None
        return _COLOURED.sub(r"[\1]", printed).strip("\n") if isinstance(printed, str) else str(observation)

    def _choice(self) -> str:
        return f"Actions: {', '.join(self._names)}."


def _render_modes(gymnasium: Any, id: str) -> Sequence[str]:
    entry = gymnasium.spec(id).entry_point
    made = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    return getattr(made, "metadata", {}).get("render_modes", ())
