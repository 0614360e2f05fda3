"""A configuration that does not fit is refused, and the proposed one is valid."""

import sys
from pathlib import Path

import pytest

from megasync.cli import commands as cli
from megasync.config import load_config
from megasync.planning.fit import FILL
from megasync.planning.plan import resolve_plan
from megasync.preflight.check import check_config

GB = 10**9


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])


def plan(name, gigabytes, *overrides):
    config = load_config(f"configs/{name}.yaml", overrides)
    check_config(config, planning=True)
    return resolve_plan(config, gigabytes * GB)


def test_on_a_shared_device_the_trainer_has_what_the_server_leaves():
    assert plan("first_gpu", 16).refusals == ()
    found = plan("first_gpu", 6)
    assert "more than a device's 6 GB beside a server of 1.8 GB" in found.refusals[0]
    assert found.nearest == ("trainer.recompute=full",)
    assert plan("first_gpu", 6, *found.nearest).refusals == ()


def test_a_configuration_that_fits_is_not_changed():
    found = plan("qwen3_8b_math", 80)
    assert (found.refusals, found.nearest) == ((), None)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "gigabytes", "overrides", "refused", "nearest"),
    [
        # Recomputing is one step; a smaller budget, or another split, would be more.
        (
            "qwen3_8b_math",
            80,
            ["trainer.tokens_per_microbatch=65536"],
            "pipeline stage 0 needs about 122 GB",
            ("trainer.recompute=full",),
        ),
        # Where everything is recomputed already, smaller microbatches.
        (
            "qwen3_8b_math",
            80,
            ["trainer.recompute=full", "trainer.tokens_per_microbatch=524288"],
            "pipeline stage 0 needs about 101 GB",
            ("trainer.tokens_per_microbatch=262144",),
        ),
        # The optimizer's state, spread over the copies that are there already.
        (
            "qwen3_8b_math",
            80,
            [
                "trainer.recompute=full",
                "trainer.tensor_parallel=2",
                "trainer.data_parallel=2",
                "trainer.distributed_optimizer=false",
            ],
            "pipeline stage 0 needs about 82 GB",
            ("trainer.distributed_optimizer=true",),
        ),
        # Nothing helps four ranks: more of them, on more nodes.
        (
            "qwen3_8b_math",
            24,
            ["trainer.recompute=full"],
            "pipeline stage 0 needs about 43 GB",
            ("trainer.tensor_parallel=8", "trainer.data_parallel=2", "cluster.address=auto", "cluster.host=auto"),
        ),
        # More of each device for its server, while the trainer, which fits, is left alone.
        (
            "qwen3_32b_math",
            45,
            ["rollout.mem_fraction=0.7"],
            "a server's KV cache holds 0 tokens",
            ("rollout.mem_fraction=0.85",),
        ),
        # Wider servers on the same devices.
        (
            "qwen3_32b_math",
            60,
            ["rollout.tensor_parallel=1", "rollout.servers=16"],
            "a server's KV cache holds 0 tokens",
            ("rollout.servers=8", "rollout.tensor_parallel=2"),
        ),
        ("qwen3_8b_math", 80, ["sync.arena=device"], "sync.arena=device takes 16.4 GB", ("sync.arena=host",)),
    ],
)
def test_the_nearest_configuration_that_fits(name, gigabytes, overrides, refused, nearest):
    found = plan(name, gigabytes, *overrides)
    assert refused in found.refusals[0]
    assert found.nearest == nearest


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "gigabytes"), [("qwen3_8b_math", 20), ("qwen3_8b_math", 40), ("qwen3_32b_math", 24)])
def test_a_proposal_is_valid_and_leaves_room(name, gigabytes):
    proposed = plan(name, gigabytes).nearest
    found = plan(name, gigabytes, *proposed)
    assert found.refusals == ()
    assert max(stage.total for stage in found.stages) <= FILL * gigabytes * GB


def test_without_a_configuration_that_fits_nothing_is_proposed():
    """A server spans at most one node, and an eighth of these weights exceeds the memory of such a device."""
    found = plan("qwen3_32b_math", 8)
    assert len(found.refusals) == 3 and found.nearest is None


def test_the_command_refuses_and_proposes_a_configuration(monkeypatch, capsys):
    def call(*arguments):
        command = ["megasync", "plan", "configs/qwen3_8b_math.yaml", "trainer.recompute=full", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code or 0, " ".join(capsys.readouterr().out.split())

    status, out = call("--device-memory", "40")
    assert status == cli.REFUSED
    assert "does not fit: pipeline stage 0 needs about 43 GB" in out
    assert "nearest configuration that fits: trainer." in out
    status, out = call("--device-memory", "1")
    assert status == cli.REFUSED and "no other split that was tried fits" in out
    assert call()[0] == 0


def test_the_plan_says_which_context_parallelism_the_longest_sequence_needs():
    long = ("data.prompt.max_tokens=2000", "rollout.sampling.max_new_tokens=30000", "rollout.context_length=null")
    long += ("trainer.recompute=null",)
    tokens = "trainer.tokens_per_microbatch"
    refused = plan("qwen3_8b_math", 80, *long, f"{tokens}=32768").refusals
    assert "needs trainer.context_parallel=2 with tokens_per_microbatch=16000, on 2 times as many" in refused[-1]
    cluster = ("cluster.address=auto", "cluster.host=auto")
    shared = plan("qwen3_8b_math", 80, *long, *cluster, "trainer.context_parallel=2", f"{tokens}=16000")
    assert shared.refusals == shared.warnings == ()
    # A budget of several sequences needs a smaller budget and no context ranks.
    refused = plan("qwen3_8b_math", 80, "trainer.recompute=null", f"{tokens}=65536").refusals
    assert not any("context_parallel" in each for each in refused)
