"""Servers keep block FP8: after each sync they hold what quantizing the whole trained model gives, bit for bit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from fp8_folders import write_fp8
from real_servers import checksums, make_server
from run_metrics import rows_of

import megasync
from megasync.serving.control import ServerControl
from megasync.starters.fetch import fetch
from megasync.sync.publisher import VersionPublisher

pytestmark = pytest.mark.real


@pytest.fixture
def held(monkeypatch) -> list[list]:
    """After each check of a version, the checksums of every server's weights."""
    found: list[list] = []
    check = VersionPublisher.check_parity

    async def noted(publisher: VersionPublisher, *arguments):
        metrics = await check(publisher, *arguments)
        found.append([await checksums(server) for server in publisher._servers.values()])
        return metrics

    monkeypatch.setattr(VersionPublisher, "check_parity", noted)
    return found


async def loaded(folder: Path, log: Path) -> list:
    server = make_server(folder, log, 1)
    server.spec.rollout.fp8, server.spec.rollout.context_length = True, 64
    server.spec = replace(server.spec, dtype="bfloat16")
    control = ServerControl(await server.start(180))
    try:
        return await checksums(control)
    finally:
        await control.close()
        await server.stop(5)


def check_run(config: Path, block: tuple[int, int], tmp_path: Path, held) -> None:
    """Trains two steps; every server then holds what quantizing the trained model gives."""
    result = megasync.AsyncTrainer(config, ["schedule.total_steps=2", "rollout.fp8=true"]).train()
    rows = rows_of(result.run_dir)
    assert 0 < max(row["sync/parity"] for row in rows if "sync/parity" in row) < 0.1
    again, _ = write_fp8(result.export_dir, tmp_path / "again", tmp_path / "again-plain", block)
    expected = asyncio.run(loaded(again, tmp_path / "log"))
    assert held[-1] == [expected, expected]
    assert held[0] != held[-1]


@pytest.mark.parametrize(
    "transport", ["p2p", *(pytest.param(name, marks=pytest.mark.matrix) for name in ("broadcast", "disk"))]
)
def test_servers_hold_the_trained_model_quantized(miniature, digits_model, tmp_path, held, transport) -> None:
    # Of each key projection, a rank has half a block.
    fp8, _ = write_fp8(digits_model, tmp_path / "fp8", tmp_path / "plain", (32, 32))
    config = miniature(model={"path": str(fp8), "dtype": "bfloat16"}, sync={"transport": transport})
    check_run(config, (32, 32), tmp_path, held)


@pytest.mark.matrix
def test_experts_of_servers_are_quantized_too(miniature, tmp_path, held) -> None:
    plain = fetch("digits_moe", tmp_path / "digits_moe")
    fp8, _ = write_fp8(plain, tmp_path / "fp8", tmp_path / "plain", (16, 16))
    split = {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 1, "sequence_parallel": True}
    config = miniature(model={"path": str(fp8), "dtype": "bfloat16"}, trainer=split | {"optimizer": {"lr": 1e-3}})
    check_run(config, (16, 16), tmp_path, held)
