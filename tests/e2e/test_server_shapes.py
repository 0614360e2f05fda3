"""Whole runs whose server has several pipeline stages, attention groups or engines, one of which is killed."""

from __future__ import annotations

import pytest
from processes import command_line
from run_metrics import steps_of

pytestmark = [pytest.mark.real, pytest.mark.matrix]

STEPS = 8
TRUNCATED = {"sampling": {"max_new_tokens": 6, "top_k": 4, "top_p": 0.9}}
# Prompts are computed in several pieces.
IN_CHUNKS = {"server_args": {"--chunked-prefill-size": 4, "--page-size": 1}}
STAGES = {"pipeline_parallel": 2}
GROUPS = {"tensor_parallel": 2, "attention_data_parallel": 2}
ENGINES = {"prefill_engines": 1, "decode_engines": 1}
KINDS = {
    "stages": ("p2p", "in_place", STAGES),
    "stages, prompts in chunks": ("p2p", "retract", STAGES | IN_CHUNKS),
    "stages, truncated sampling": ("p2p", "retract", STAGES | TRUNCATED),
    "stages, a folder": ("disk", "retract", STAGES),
    "groups": ("p2p", "retract", GROUPS),
    "groups, prompts in chunks": ("p2p", "in_place", GROUPS | IN_CHUNKS),
    "groups, truncated sampling": ("broadcast", "retract", GROUPS | TRUNCATED),
    "groups, a folder": ("disk", "abort", GROUPS),
    "engines": ("p2p", "abort", ENGINES),
    "engines, prompts in chunks": ("p2p", "abort", ENGINES | {"prefill_engines": 2} | IN_CHUNKS),
    "engines, a folder": ("disk", "abort", ENGINES | {"decode_engines": 2}),
}
# What the command line of the process that is killed has in it, or that of the process that started it.
KILLED = {"stages": "_PP1", "groups": "_DP1", "engines": "--disaggregation-mode prefill"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_what_was_sampled_and_survives_the_death_of_a_process(kind, miniature, launch, the_run_dir):
    transport, pause, keys = KINDS[kind]
    config = miniature(
        schedule={"total_steps": STEPS},
        rollout={"servers": 1, **keys},
        sync={"bucket_mb": 1, "transport": transport, "pause_mode": pause},
        # Every response is scored, also those of a group with equal rewards.
        algorithm={"entropy_coef": 0.001},
    )
    run = launch("train", config)
    run.wait_for("step 2/")
    mark = KILLED[kind.partition(",")[0]] if kind != "engines, a folder" else "--disaggregation-mode decode"
    processes = run.find("sglang::scheduler")
    process = next(each for each in processes if mark in command_line(each) + command_line(each.parent()))
    process.kill()
    assert run.wait() == 0, run.output
    steps = steps_of(the_run_dir())
    assert [row["step"] for row in steps] == [*range(1, STEPS + 1)]
    # The trainer's log-probs of tokens that the current version sampled are the server's. With `in_place`, some come
    # from keys and values of the version before.
    gaps = [row["train/server_kl@0"] for row in steps if "train/server_kl@0" in row]
    assert gaps and (pause == "in_place" or max(gaps) < 1e-8)
    assert "its process has ended" in run.output
    assert run.survivors() == []
