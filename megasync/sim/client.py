"""The real rollout client and the real server control, both over the simulated network."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from megasync.config import Config
from megasync.rollout.client import RolloutClient
from megasync.rollout.quarantine import Quarantine
from megasync.serving.control import ServerControl
from megasync.sim.language import CONTEXT, END, VOCABULARY, Tokenizer
from megasync.sim.network import ROUTER_URL, Network, SimSession
from megasync.sim.servers import SimServer


class SimClient(RolloutClient):
    """The rollout client of driver number `life`."""

    def __init__(
        self,
        config: Config,
        network: Network,
        life: int,
        seed: int,
        quarantine: Quarantine,
        on_invalid_answer: Callable[[], None],
    ) -> None:
        super().__init__(
            ROUTER_URL,
            [],
            vocab_size=VOCABULARY,
            context_length=CONTEXT,
            sampling=config.rollout.sampling,
            request_timeout=config.timeouts.request,
            tokenizer=Tokenizer(),
            stream_interval=config.rollout.stream_interval,
            chat=config.rollout.chat,
            stop_ids=(END,),
            quarantine=quarantine,
            on_invalid_answer=on_invalid_answer,
        )
        self._session: Any = SimSession(network)
        # The real client's random choices must reproduce with the seed.
        self._random = random.Random(f"client {seed} {life}")


class SimControl(ServerControl):
    """Control of one simulated server. The simulated weight sync accesses `server` directly."""

    def __init__(self, server: SimServer, network: Network) -> None:
        super().__init__(server.url)
        self.server = server
        self._session: Any = SimSession(network)
