"""An OpenEnv server whose episodes are two answers, with traps in the second one. Runs in OpenEnv's own environment."""

import os
import time

from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from traps import STAY, finish, sprung

PLACES = ("worker", "driver", "environment")


class Said(Action):
    text: str


class Shown(Observation):
    text: str


class Trapped(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.said = []

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.said = []
        return Shown(text=f">{seed % 1000:03}=", reward=0.0)

    def step(self, action, timeout_s=None, **kwargs):
        self.said.append(action.text)
        if len(self.said) == 1:
            return Shown(text="3", reward=0.0)
        if any(sprung(place, os.getpid()) for place in PLACES):
            time.sleep(STAY)
        return Shown(text="", reward=finish(self.said), done=True)

    @property
    def state(self):
        return State()


app = create_fastapi_app(Trapped, Said, Shown, max_concurrent_envs=64)
