"""The trainer records each response of a step once, with what its loss was computed from, in every layout."""

from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from trainer_ranks import TWO_RANKS

from megasync.config.schema import AlgorithmConfig
from megasync.observe.rollouts import RolloutLog
from megasync.watch.recorded import RolloutIndex

# Four groups of three responses.
ALL = 100
STEPPED = {"most": ALL, "batch": {"stepped": True}, "algorithm": {"advantage": "grpo_process"}}
LAYOUTS = {"alone": {}, "minibatches": {"data_parallel": 2, "minibatches": 2}, **TWO_RANKS}


@pytest.fixture(scope="module")
def recorded(run_ranks, models, tmp_path_factory):
    """Metrics and the folder of records by setting; those of "alone" are of one rank."""
    folder = tmp_path_factory.mktemp("records")
    spread = {name: {"most": ALL, "trainer": trainer} for name, trainer in LAYOUTS.items() if name != "alone"}
    spread["uniform"] = {"most": ALL, "trainer": LAYOUTS["dp2"], "batch": {"uniform": [1, 2]}}
    spread["few"] = {"most": 7, "trainer": LAYOUTS["dp2"]}
    spread["stepped"] = {**STEPPED, "trainer": LAYOUTS["dp2"]}
    alone = {"alone": {"most": ALL}}
    results = run_ranks(recordings, 1, model=models["qwen3"], folder=str(folder), runs=alone)[0]
    results |= run_ranks(recordings, 2, model=models["qwen3"], folder=str(folder), runs=spread)[0]
    return folder, results


def rows_of(recorded, name):
    index = RolloutIndex(recorded[0] / name)
    index.update()
    return index, {(row.uid, row.sample): row for row in index.rows}


def lines_of(recorded, name):
    paths = [*(recorded[0] / name / "rollouts").glob("*.index")]
    return sum(len(path.read_bytes().splitlines()) for path in paths), {path.name for path in paths}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_response_has_one_record_in_every_layout(recorded, layout):
    _, rows = rows_of(recorded, layout)
    assert rows.keys() == {(f"0:{group}", sample) for group in range(4) for sample in range(3)}
    assert lines_of(recorded, layout)[0] == 12
    assert {(row.step, row.version, row.staleness, row.dropped) for row in rows.values()} == {(1, 2, 2, "")}
    _, same = rows_of(recorded, "alone")
    for key, row in rows.items():
        assert (row.reward, row.tokens, row.prompt_tokens) == (
            same[key].reward,
            same[key].tokens,
            same[key].prompt_tokens,
        )
        assert row.advantage == pytest.approx(same[key].advantage, abs=1e-6)
        if same[key].gap is not None:
            assert row.gap == pytest.approx(same[key].gap, rel=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_recorded_gap_is_that_of_the_metrics(recorded, layout):
    index, rows = rows_of(recorded, layout)
    gaps = []
    for row in rows.values():
        response = index.read(row)
        if response.trainer_logprobs is not None:
            trained = response.mask.expand() == 1
            assert np.isnan(response.trainer_logprobs).tolist() == (~trained).tolist()
            gaps.append(np.abs(response.trainer_logprobs - response.logprobs)[trained])
            assert row.gap == pytest.approx(gaps[-1].mean(), rel=1e-5)
    assert np.concatenate(gaps).mean() == pytest.approx(recorded[1][layout]["train/logprob_diff"], rel=1e-3)


def test_advantages_of_a_group_are_relative(recorded):
    _, rows = rows_of(recorded, "alone")
    for group in range(4):
        advantages = [rows[f"0:{group}", sample].advantage for sample in range(3)]
        assert sum(advantages) == pytest.approx(0, abs=1e-6)
        assert advantages[0] < 0 < advantages[2]


def test_responses_without_a_gradient_are_recorded_too(recorded):
    index, rows = rows_of(recorded, "uniform")
    assert len(rows) == lines_of(recorded, "uniform")[0] == 12
    for group in (1, 2):
        for sample in range(3):
            row = rows[f"0:{group}", sample]
            assert (row.advantage, row.gap) == (0.0, None)
            assert index.read(row).trainer_logprobs is None


def test_all_ranks_choose_the_same_whole_groups(recorded):
    _, rows = rows_of(recorded, "few")
    groups = {uid for uid, _ in rows}
    assert rows.keys() == {(uid, sample) for uid in groups for sample in range(3)}
    assert len(groups) == 2


def test_advantages_of_tokens_and_their_rewards_are_recorded(recorded):
    index, rows = rows_of(recorded, "stepped")
    response = index.read(rows["0:0", 1])
    known = response.advantages[~np.isnan(response.advantages)]
    assert len(set(known.tolist())) > 1
    assert rows["0:0", 1].advantage == pytest.approx(known.mean(), abs=1e-6)
    assert np.isnan(response.rewards[1::2]).all() and not np.isnan(response.rewards[::2]).any()


def recordings(model, folder, runs):
    """Metrics of a step for each entry of `runs`, whose responses are recorded below ``folder`` under its name."""
    from rank_engines import PolicyTrainer, close, make_engine, make_groups, train_on

    from megasync.trainer.recording import Recorder

    results = {}
    for name, arguments in runs.items():
        engine = make_engine(model, arguments.get("trainer"))
        record = Recorder(
            RolloutLog(Path(folder) / name, f"trainer-{dist.get_rank()}", 2**24), arguments["most"], engine
        )
        algorithm = AlgorithmConfig(**arguments.get("algorithm", {}))
        policy = PolicyTrainer(engine, algorithm, dump_dir="unused", recorder=record)
        results[name] = train_on(policy, make_groups(1, **arguments.get("batch", {})), 1, 2)
        close(engine)
    return results
