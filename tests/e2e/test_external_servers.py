"""A run on a server that was started without it: it is lost and comes back, and outlives the run."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from real_servers import generate, make_server, spans

from megasync.config.access import EXTERNAL_KEY_VARIABLE
from megasync.serving.control import ServerControl
from megasync.serving.server import SGLangServer

pytestmark = pytest.mark.real

KEY = "a-key-of-those-who-started-it"


class ForeignServer(SGLangServer):
    """A stock server: it has SGLang's own key, and nobody looks at it after its start."""

    async def _after_start(self) -> None: ...


def foreign(model: Path, log: Path, port: int = 0) -> ForeignServer:
    spec = make_server(model, log, 1, writes=True).spec
    spec.rollout.context_length = 64
    spec.rollout.server_args = {"--api-key": KEY}
    return ForeignServer(spec, "127.0.0.1", port, log)


def test_a_run_trains_on_a_server_of_others_that_is_lost_and_comes_back(
    miniature, launch, the_run_dir, digits_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = foreign(digits_model, tmp_path / "foreign.log")
    url = asyncio.run(server.start(180))
    try:
        config = miniature(
            schedule={"total_steps": 100_000},
            rollout={"servers": 1, "external": [url], "min_servers": 1},
            trainer={"tensor_parallel": 1},
        )
        monkeypatch.setenv(EXTERNAL_KEY_VARIABLE, "another-key")
        refused = launch("train", config)
        assert refused.wait() == 2
        assert f"{url} refuses the key in {EXTERNAL_KEY_VARIABLE}" in refused.output

        monkeypatch.setenv(EXTERNAL_KEY_VARIABLE, KEY)
        run = launch("train", config)
        run.wait_for("step 2/")
        server.kill()
        run.wait_for("-> dead")
        port = int(url.rpartition(":")[2])
        server = foreign(digits_model, tmp_path / "again.log", port)
        assert asyncio.run(server.start(180)) == url
        run.wait_for(f"{url} joined at version")
        run.wait_for(f"step {run.last_step() + 2}/")
        run.ends_cleanly(signal.SIGTERM, the_run_dir())
        assert KEY not in run.output

        async def held() -> tuple[int, list[str]]:
            control = ServerControl(url, KEY)
            try:
                return await control.weight_version(), spans(await generate(control, 4))
            finally:
                await control.close()

        # It still serves what the run has published last.
        version, sampled = asyncio.run(held())
        assert version >= run.last_step() and sampled == [str(version)]
    finally:
        asyncio.run(server.stop(5))
