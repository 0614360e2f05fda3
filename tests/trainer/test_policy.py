"""The policy training step: normalisation, skipped trajectories, minibatches, the reference, non-finite steps."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from trainer_ranks import TWO_RANKS, assert_same_metrics

from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.config.schema import AlgorithmConfig, Config
from megasync.errors import TrainingError
from megasync.trajectory import Group

OF_RESPONSES = [name for name, item in ADVANTAGES.items() if not item.critic]
# Its advantages need the probabilities of all tokens.
NORMS = {"steps": 2, "stepped": True, "algorithm": {"advantage": "optimal_token_baseline"}}
# Some tokens have rewards, some of these tokens are not trained.
STEPPED = {"steps": 2, "stepped": True, "algorithm": {"advantage": "grpo_process"}}
PLAIN = {"correction": "none"}
# Proximal and reference log-probs, which stay on the ranks that compute them.
SCORED = {"steps": 2, "algorithm": {"kl_coef": 0.1}}
# A penalty in the rewards, which are then known only after the policy was scored.
REWARD_KL = {"steps": 2, "algorithm": {"kl_coef": 0.5, "kl_in": "reward", "kl_kind": "k1"}}
# Its advantages need the reference, and so are estimated a second time.
DPO = {"steps": 2, "algorithm": {**PLAIN, "advantage": "dpo", "loss": "gpg", "advantage_options": {"beta": 2.0}}}
# Two of four trajectories of a group are one sample, each of which may be on another rank.
FORKED = {"steps": 2, "samples": 4, "forked": True}
FORKS = {
    "forked steps": {**FORKED, **STEPPED},
    "forked norms": {**FORKED, **NORMS},
    "forked kl": {**FORKED, "algorithm": {**REWARD_KL["algorithm"], "advantage": "grpo_process"}},
    "forked dpo": {**FORKED, **DPO},
    "forked weight": {**FORKED, "algorithm": {"advantage": "rloo", "aggregation": "sequence"}},
}
# Two of three responses have a teacher.
TEACHERS = {"steps": 2, "teachers": True, "algorithm": {"teacher_coef": 0.2}}
# Sequences of one step are weighed alike, and each is a whole in the loss.
SEQUENCES = {"steps": 1, "algorithm": {"advantage": "rloo", "loss": "gspo", "aggregation": "sequence"}}
# Which tokens are restrained is decided over all microbatches and ranks, also after a first optimizer step.
CHOSEN = {
    f"{loss} chosen": {
        "steps": 2,
        "algorithm": {"loss": loss, "loss_options": {"share": 0.2, **more}, "entropy_coef": 0.01},
        "optimizer": {"lr": 0.01},
    }
    for loss, more in (("kl_cov", {"coef": 3.0}), ("clip_cov", {"least": 0.01}))
}
# What servers get of adapters is merged and rounded.
ADAPTERS = {"steps": 2, "dtype": "bfloat16", "trainer": {"lora": {"rank": 4}}, "optimizer": {"lr": 1e-4}}
# Two sequences, for four data-parallel ranks.
FEW = {"steps": 1, "groups": 1, "samples": 2, "algorithm": {"entropy_coef": 0.1}}
HALVES = {"minibatches": 2}
RUNS = {
    "plain": {"steps": 2},
    "uniform": {"steps": 1, "algorithm": PLAIN, "uniform": [1, 2]},
    "uniform-kl": {"steps": 1, "algorithm": {**PLAIN, "kl_coef": 1e-12}, "uniform": [1, 2]},
    "minibatches": {
        "steps": 1,
        "algorithm": PLAIN,
        "trainer": HALVES,
        "optimizer": {"lr": 0.05},
        "uniform": [1, 2],
    },
    "entropy": {"steps": 1, "algorithm": {"entropy_coef": 0.5}},
    "correction": {"steps": 1, "algorithm": {"correction": "sequence"}},
    "bfloat16": {"steps": 2, "dtype": "bfloat16"},
    "still": {"steps": 1, "optimizer": {"lr": 1e-9}},
    "few": FEW,
    "scored": {**SCORED, "trainer": HALVES},
    "sequences": SEQUENCES,
    "constant": {"steps": 1, "algorithm": {"aggregation": "constant"}},
    **{f"loss {name}": {"steps": 1, "algorithm": {"loss": name}} for name in LOSSES},
    **{f"advantage {name}": {"steps": 1, "algorithm": {"advantage": name}} for name in OF_RESPONSES},
    "reward-kl": REWARD_KL,
    "teachers": TEACHERS,
    "dpo": DPO,
    "stepped": STEPPED,
    "norms": NORMS,
    "stepped minibatches": {**STEPPED, "trainer": HALVES},
    "process": {"steps": 2, "algorithm": {"advantage": "grpo_process"}},
    **FORKS,
    "by trajectory": {
        **FORKED,
        "algorithm": {"advantage": "rloo", "aggregation": "sequence", "sample_weight": "trajectory"},
    },
    "teachers alone": {**TEACHERS, "algorithm": {**PLAIN, "reward_coef": 0.0}},
    "decay": {"steps": 1, "optimizer": {"lr": 1e-9, "weight_decay": 1e8}},
    **{name: {**settings, "trainer": HALVES} for name, settings in CHOSEN.items()},
    **{f"{name} small": {**run, "trainer": {**HALVES, "tokens_per_microbatch": 30}} for name, run in CHOSEN.items()},
    "clip_cov once": CHOSEN["clip_cov chosen"],
    "adapters": ADAPTERS,
}
SCORES = ("plain", "scored", "reward-kl", "teachers", "dpo", "stepped", "norms")
# With these, layouts round otherwise.
ROUNDED = ("bfloat16", "adapters")
# Which runs two ranks repeat in a layout.
SPREAD = {
    "dp2": (*SCORES, "stepped minibatches", "correction", "sequences", *FORKS, *CHOSEN),
    "pp2": (*SCORES, "forked steps", *CHOSEN),
    "tp2": ("norms", *CHOSEN, "bfloat16", "adapters"),
    "cp2": ("norms", "stepped", "forked steps", *CHOSEN),
}
# The standard tier runs a layout that divides data and one that divides layers.
PAIRS = [
    pytest.param(layout, name, marks=pytest.mark.matrix if layout in ("tp2", "cp2") else ())
    for layout, names in SPREAD.items()
    for name in names
    if name not in ROUNDED
]


@pytest.fixture(scope="module")
def model(models):
    return models["qwen3"]


@pytest.fixture(scope="module")
def runs(run_ranks, model):
    """One rank's training under several settings."""
    return run_ranks("policies", 1, model=model, runs=RUNS)[0]


@pytest.fixture(scope="module")
def spread(run_ranks, model):
    """spread(layout): the same of some of them, of each of two ranks."""

    @cache
    def over(layout):
        settings = {
            name: RUNS[name] | {"trainer": {**RUNS[name].get("trainer", {}), **TWO_RANKS[layout]}}
            for name in SPREAD[layout]
        }
        return run_ranks("policies", 2, model=model, runs=settings)

    return over


@pytest.fixture(scope="module")
def hand(run_ranks, model):
    return run_ranks(by_hand, 1, model=model, uniform=[1, 2])[0]


def largest_difference(left, right):
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.parametrize(("layout", "name"), PAIRS)
def test_metrics_are_the_same_on_every_rank_and_layout(runs, spread, layout, name):
    ranks = [rank[name]["metrics"] for rank in spread(layout)]
    for alone, first, second in zip(runs[name]["metrics"], *ranks, strict=True):
        assert_same_metrics(first, alone, rel=1e-4, abs=1e-5)
        assert_same_metrics(first, second, rel=0, abs=0)


@pytest.mark.parametrize("name", CHOSEN)
def test_the_share_of_restrained_tokens_does_not_depend_on_the_packing(runs, name):
    for small, large in zip(runs[f"{name} small"]["metrics"], runs[name]["metrics"], strict=True):
        assert_same_metrics(small, large, rel=1e-4, abs=1e-5)
        assert small["train/clip_fraction"] > 0.05
    # Without an earlier optimizer step, too, the batch is scored before.
    assert runs["clip_cov once"]["metrics"][0]["train/clip_fraction"] > 0.05


def test_the_gap_to_the_teacher_is_an_advantage_of_its_token(runs):
    """On-policy and uncorrected, the loss is minus the mean advantage: alone, the estimate of the KL divergence, which
    is that of the tokens with a teacher.
    """
    alone, tokens = runs["teachers alone"]["metrics"][0], runs["teachers alone"]["teacher_tokens"]
    assert 0 < tokens < alone["train/tokens"], "some tokens have no teacher"
    assert alone["train/loss"] * alone["train/tokens"] == pytest.approx(alone["train/teacher_kl"] * tokens, rel=1e-4)
    assert alone["train/grad_norm"] > 0
    mixed = runs["teachers"]["metrics"][0]["train/teacher_kl"]
    assert mixed == pytest.approx(alone["train/teacher_kl"], rel=1e-4)


def test_a_kl_penalty_in_the_rewards_changes_advantages_only(runs):
    """It is 0 in the first step, with the initial weights. There is no term in the loss."""
    (first, second), plain = runs["reward-kl"]["metrics"], runs["plain"]["metrics"]
    assert first["train/reward_penalty"] == pytest.approx(0, abs=1e-6)
    assert first["train/loss"] == pytest.approx(plain[0]["train/loss"], rel=1e-5, abs=1e-7)
    assert abs(second["train/reward_penalty"]) > 1e-4
    assert second["train/grad_norm"] != pytest.approx(plain[1]["train/grad_norm"], rel=1e-4)


def test_rewards_of_steps_are_compared_in_their_group_and_without_them_it_is_grpo(runs):
    """The rewards of steps are parts of those of responses, so the metrics of rewards are the same."""
    stepped, process, plain = (runs[name]["metrics"][0] for name in ("stepped", "process", "plain"))
    assert stepped["train/reward"] == process["train/reward"]
    assert stepped["train/grad_norm"] != pytest.approx(process["train/grad_norm"], rel=1e-2)
    # All responses are computed, also those without an advantage.
    assert process["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)


def test_a_sample_counts_once_in_means_and_weighs_what_the_configuration_says(runs):
    """Its reward is the mean of 0 and 1, those of the other samples are 2 and 3."""
    sample, trajectory = (runs[name]["metrics"][0] for name in ("forked weight", "by trajectory"))
    assert sample["train/reward"] == trajectory["train/reward"] == pytest.approx(5.5 / 3)
    assert sample["train/sequences"] == 16
    assert sample["train/grad_norm"] != pytest.approx(trajectory["train/grad_norm"], rel=1e-2)


def test_a_rank_loads_only_what_it_computes(spread):
    """Of each group, the middle one of three has no advantage."""
    needed = sorted((f"0:{group}", place) for group in range(4) for place in (0, 2))
    for step in range(2):
        first, second = (rank["plain"]["loaded"][step] for rank in spread("dp2"))
        assert sorted(first + second) == needed
        assert first and second
        assert all(rank["plain"]["loaded"][step] == needed for rank in spread("pp2"))


def test_masked_copies_on_ranks_without_a_sequence_change_nothing(runs, run_ranks, model):
    settings = {**FEW, "trainer": {"data_parallel": 4}}
    for rank in run_ranks("policies", 4, model=model, runs={"few": settings}):
        assert_same_metrics(rank["few"]["metrics"][0], runs["few"]["metrics"][0], rel=1e-4, abs=1e-5)


def test_a_constant_divisor_is_of_sequences_times_the_longest_response(runs):
    """The engine here was told that a response has one token."""
    plain, constant = runs["plain"]["metrics"][0], runs["constant"]["metrics"][0]
    scale = plain["train/tokens"] / plain["train/sequences"]
    assert constant["train/grad_norm"] == pytest.approx(scale * plain["train/grad_norm"], rel=1e-4)
    assert constant["train/loss"] == pytest.approx(scale * plain["train/loss"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", [f"loss {name}" for name in LOSSES] + [f"advantage {name}" for name in OF_RESPONSES])
def test_every_loss_and_estimator_trains(runs, kind):
    (metrics,) = runs[kind]["metrics"]
    assert metrics["train/skipped"] == 0 and all(math.isfinite(value) for value in metrics.values())
    if kind.startswith("loss") and kind.split()[1] not in ("clip_cov", "geo_mean"):
        # The first step is on-policy: all of these are the plain policy gradient, if all tokens of a response weigh the
        # same, which those with a correction of tokens do not.
        assert metrics["train/grad_norm"] == pytest.approx(runs["plain"]["metrics"][0]["train/grad_norm"], rel=1e-4)


@pytest.mark.matrix
def test_bfloat16_trains_close_to_float32(runs, spread):
    for results in (runs["bfloat16"], spread("tp2")[0]["bfloat16"]):
        for mine, exact in zip(results["metrics"], runs["plain"]["metrics"], strict=True):
            assert mine["train/loss"] == pytest.approx(exact["train/loss"], abs=0.03)
            assert mine["train/grad_norm"] == pytest.approx(exact["train/grad_norm"], rel=0.1)
        assert all(tensor.dtype == torch.bfloat16 for tensor in results["weights"].values())


@pytest.mark.matrix
def test_the_part_of_adapters_that_merged_weights_have_is_measured_over_all_ranks(runs, spread):
    for step in range(2):
        actual = [runs["adapters"], *(rank["adapters"] for rank in spread("tp2"))]
        alone, *ranks = (each["metrics"][step]["train/merged_cosine"] for each in actual)
        assert 0 < alone < 0.999 and ranks[0] == ranks[1] == pytest.approx(alone, abs=0.05)
    assert "train/merged_cosine" not in runs["bfloat16"]["metrics"][1]


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_bfloat16_main_weights_start_with_the_folders_precision(run_ranks, models, family):
    model = models[family]
    exact = torch.cat([tensor.flatten() for tensor in load_file(Path(model) / "model.safetensors").values()])
    layouts = {
        "replicated": {"data_parallel": 2, "distributed_optimizer": False},
        "sharded": {"data_parallel": 2, "distributed_optimizer": True},
    }
    if family == "qwen3_moe":
        layouts["experts"] = {"data_parallel": 2, "expert_parallel": 2}
    ranks = run_ranks(main_weights, 2, model=model, trainers=layouts)
    shared = [torch.cat([rank[label] for rank in ranks]) for label in layouts if label != "replicated"]
    for start in (ranks[0]["replicated"], *shared):
        # All but the zeros of vocabulary padding, in any order.
        assert torch.equal(start[start != 0].sort().values, exact.sort().values)


def test_all_metrics_are_there_and_finite(runs):
    names = (
        "loss grad_norm lr entropy clip_fraction dual_clip_fraction is_weight_mean is_outside_fraction "
        "is_rejected_fraction is_effective_share logprob_diff approx_kl computed_tokens without_gradient "
        "reward_std uniform_groups "
        "tokens sequences staleness_mean staleness_max reward seconds skipped token_staleness "
        "response_length response_length_p50 response_length_p90 response_length_p99 "
        "tokens_per_second_per_device tflops_per_device"
    )
    for version, metrics in enumerate(runs["plain"]["metrics"], 1):
        # All tokens were sampled by version 0.
        assert set(metrics) == {
            f"train/{name}" for name in [*names.split(), f"server_kl@{version}", f"token_staleness@{version}"]
        }
        assert all(math.isfinite(value) for value in metrics.values())


def test_counts_and_staleness_are_of_all_trajectories(runs):
    metrics = runs["uniform"]["metrics"][0]
    assert metrics["train/sequences"] == 12
    assert metrics["train/staleness_mean"] == metrics["train/staleness_max"] == 1
    assert metrics["train/tokens"] == runs["uniform-kl"]["metrics"][0]["train/tokens"]


def test_leaving_out_sequences_without_advantage_changes_nothing(runs, hand):
    """Against the plain gradient of all trajectories, computed by hand."""
    assert runs["uniform"]["metrics"][0]["train/grad_norm"] == pytest.approx(hand["grad_norm"], rel=1e-5)
    assert largest_difference(runs["uniform"]["weights"], hand["after_one"]) < 1e-5
    assert largest_difference(runs["uniform-kl"]["weights"], hand["after_one"]) < 1e-4


def test_minibatches_are_steps_against_the_log_probs_from_before_the_first(runs, hand):
    assert largest_difference(runs["minibatches"]["weights"], hand["after_two"]) < 1e-5
    assert runs["minibatches"]["metrics"][0]["train/clip_fraction"] > 0


def test_an_entropy_bonus_adds_its_gradient(runs):
    assert runs["entropy"]["metrics"][0]["train/loss"] < runs["plain"]["metrics"][0]["train/loss"] - 1.0
    assert runs["entropy"]["metrics"][0]["train/grad_norm"] != runs["plain"]["metrics"][0]["train/grad_norm"]


def test_weight_decay_is_for_matrices_only(runs):
    """A step of 1e-9 with a decay of 1e8 takes a tenth off every weight that decays."""
    for name, still in runs["still"]["weights"].items():
        decayed = runs["decay"]["weights"][name]
        expected = still * 0.9 if still.dim() == 2 else still
        torch.testing.assert_close(decayed, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("ranks", [2])
def test_reference_weights_are_the_initial_ones_and_are_removed_after_scoring(run_ranks, model, ranks):
    for results in run_ranks(reference, ranks, model=model):
        assert torch.equal(results["referred"], results["initial"])
        assert torch.equal(results["again"], results["trained"])
        assert (results["trained"] - results["initial"]).abs().max() > 1e-3
        first, second = results["metrics"]
        assert first["train/kl"] == pytest.approx(0.0, abs=1e-6)
        assert second["train/kl"] > 1e-6


@pytest.mark.parametrize("ranks", [2])
@pytest.mark.parametrize("options", [{}, {"lora": {"rank": 4, "alpha": 256.0}}], ids=["weights", "adapters"])
def test_a_renewed_reference_is_that_of_its_step_also_after_a_resume(run_ranks, model, tmp_path, ranks, options):
    """Renewed after steps 2 and 4: the KL of the steps that follow starts at zero."""
    for results in run_ranks(renewed_reference, ranks, model=model, folder=str(tmp_path), options=options):
        kl = results["kl"]
        assert kl[0] == pytest.approx(0.0, abs=1e-6) and kl[2] == pytest.approx(0.0, abs=1e-6)
        assert kl[1] > 1e-6 and kl[3] > 1e-6
        # Resumed after step 3, whose reference is from step 2.
        assert results["resumed"] == pytest.approx(kl[3], rel=1e-5)


def test_a_non_finite_step_is_skipped_on_all_ranks(run_ranks, model, tmp_path):
    ranks = run_ranks("guard", 2, model=model, folder=str(tmp_path))
    for rank in ranks:
        assert rank["skipped"]["train/skipped"] == 1
        assert rank["unchanged"]
        assert rank["fine"]["train/skipped"] == 0
        assert rank["changed"]
        # The good step in between started the count anew: two more are allowed, the third ends the run.
        assert rank["survived"] == 2
        assert "trainer.max_skipped_steps=2" in rank["error"]
    dumps = sorted(path.name for path in tmp_path.iterdir())
    assert dumps == [f"step-{step:08d}-0.json" for step in (1, 3, 4, 5)]
    record = json.loads((tmp_path / dumps[0]).read_text())
    assert (record["step"], record["version"]) == (1, 0)
    assert {entry["uid"] for entry in record["batch"]} == {"0:0", "0:1", "0:2", "0:3"}
    assert all(set(entry["trajectory"]["versions"]) == {0} for entry in record["batch"])
    assert "nan" in record["batch"][0]["trajectory"]["logprobs"]


def test_a_step_without_gradient_is_not_taken_and_a_skipped_one_is_in_no_mean(run_ranks, model, tmp_path):
    results = run_ranks(idle, 1, model=model, folder=str(tmp_path))[0]
    for metrics in (results["uniform"], results["masked"]):
        assert (metrics["train/skipped"], metrics["train/without_gradient"]) == (0, 1)
    assert (results["uniform"]["train/uniform_groups"], results["uniform"]["train/reward_std"]) == (1, 0)
    assert results["uniform"]["train/tokens"] > 0 == results["masked"]["train/tokens"]
    assert results["unchanged"]
    assert "group lone cannot be trained" in results["error"]
    half = results["half"]
    assert (half["train/skipped"], half["train/without_gradient"]) == (1, 0)
    # Of four groups one is uniform, and a response of each third has no advantage.
    assert half["train/uniform_groups"] == 0.25 and half["train/reward_std"] > 0
    assert 0 < half["train/computed_tokens"] < half["train/tokens"]
    assert all(math.isfinite(value) for value in half.values())


def main_weights(model, trainers):
    """The float32 weights that a bfloat16 optimizer starts from, as one vector per layout."""
    from rank_engines import checkpoint, close, make_engine

    results = {}
    for name, trainer in trainers.items():
        engine = make_engine(model, trainer, dtype="bfloat16")
        slices = engine.optimizer.slices(engine.weights).values()
        results[name] = torch.cat([part.tensors[checkpoint.MAIN_WEIGHT].clone() for part in slices])
        close(engine)
    return results


def by_hand(model, uniform):
    """One step of the on-policy gradient over *all* trajectories, and two PPO minibatches, without PolicyTrainer."""
    from rank_engines import Sample, close, make_engine, make_groups, weights

    from megasync.algorithms.advantages import of_group

    def plan(seed):
        members, advantages = [], []
        for group in make_groups(seed, uniform=uniform):
            members.append(group.trajectories)
            advantages.append(of_group([t.reward for t in group.trajectories], True))
        return members, advantages

    def flat(groups):
        return [item for group in groups for item in group]

    def scored(trajectory):
        return [i for i, keep in enumerate(trajectory.loss_mask) if keep]

    def update(engine, members, advantages, old):
        share = engine.local_batch(samples := [Sample.of(t.prompt_ids, t.response_ids, scored(t)) for t in members])
        tokens = sum(len(sample.scored) for sample in samples)

        def loss(batch, logprobs, entropy):
            total = 0.0
            own = share.microbatches[batch.index].sequences
            for index, part in zip(own, logprobs.split(batch.counts), strict=True):
                ratio = (part - (part.detach() if old is None else old[index])).exp()
                free, bounded = ratio * advantages[index], ratio.clamp(0.8, 1.28) * advantages[index]
                total = total - torch.minimum(free, bounded).sum()
            return total / tokens, {}

        engine.forward_backward(share, loss)
        return engine.update(1, True).grad_norm

    members, advantages = plan(1)
    engine = make_engine(model)
    norm = update(engine, flat(members), flat(advantages), None)
    after_one = weights(engine)
    close(engine)

    engine = make_engine(model, optimizer={"lr": 0.05})
    halves = [(flat(members[part]), flat(advantages[part])) for part in (slice(2), slice(2, None))]
    # Scored in the trainer's packing, without those that have no advantage: Adam amplifies differences in rounding.
    olds = []
    for trajectories, weighed in halves:
        samples = [Sample.of(t.prompt_ids, t.response_ids, scored(t)) for t in trajectories]
        scores = iter(engine.score_everywhere([s for s, weight in zip(samples, weighed, strict=True) if weight]))
        olds.append(
            [next(scores) if weight else torch.zeros(len(s.scored)) for s, weight in zip(samples, weighed, strict=True)]
        )
    for half, old in zip(halves, olds, strict=True):
        update(engine, *half, old)
    after_two = weights(engine)
    close(engine)
    return {"grad_norm": norm, "after_one": after_one, "after_two": after_two}


def reference(model):
    """Scores by reference weights, before and after training, and whether the current ones are unchanged."""
    from rank_engines import PolicyTrainer, Sample, close, make_engine, make_groups, train_on

    engine = make_engine(model, {"tensor_parallel": dist.get_world_size()})
    policy = PolicyTrainer(engine, AlgorithmConfig(kl_coef=0.1), dump_dir="unused")
    samples = [Sample.of(t.prompt_ids, t.response_ids, [0, 1]) for t in make_groups(1)[0].trajectories]
    initial = torch.cat(engine.score_everywhere(samples))
    metrics = [train_on(policy, make_groups(seed), seed) for seed in (1, 2)]
    trained = torch.cat(engine.score_everywhere(samples))
    referred = torch.cat(engine.score_everywhere(samples, reference=True))
    again = torch.cat(engine.score_everywhere(samples))
    close(engine)
    return {"initial": initial, "trained": trained, "referred": referred, "again": again, "metrics": metrics}


def renewed_reference(model, folder, options=None):
    """The KL of four steps with a reference that is renewed every two, and of the fourth after a resume."""
    from rank_engines import PolicyTrainer, TrainerRank, checkpoint, close, make_engine, make_groups, train_on

    folder, trainer = Path(folder), {"tensor_parallel": dist.get_world_size(), **(options or {})}
    algorithm = AlgorithmConfig(kl_coef=0.1, reference_every=2)
    engine = make_engine(model, trainer)
    policy = PolicyTrainer(engine, algorithm, dump_dir="unused")
    kl = []
    for step in (1, 2, 3, 4):
        kl.append(train_on(policy, make_groups(step), step)["train/kl"])
        engine.save(checkpoint.step_path(folder, step), {"step": step})
    close(engine)
    rank = TrainerRank(Config(algorithm=algorithm), dist.get_rank(), dist.get_world_size(), str(folder))
    rank._learner = engine = make_engine(model, trainer)
    policy = PolicyTrainer(engine, algorithm, dump_dir="unused")
    rank.load(str(checkpoint.step_path(folder, 3)))
    resumed = train_on(policy, make_groups(4), 4)["train/kl"]
    close(engine)
    return {"kl": kl, "resumed": resumed}


def idle(model, folder):
    """Batches without anything to learn: equal rewards everywhere, everything masked, and in one half a NaN."""
    from rank_engines import PolicyTrainer, close, make_engine, make_groups, train_on, weights

    engine = make_engine(model)
    policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir="unused")
    before = weights(engine)
    uniform = train_on(policy, make_groups(1, uniform=range(4)), 1)
    masked = make_groups(2)
    for group in masked:
        group.trajectories[:] = [replace(t, loss_mask=[0] * len(t.loss_mask)) for t in group.trajectories]
    masked = train_on(policy, masked, 2)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in engine.params().items())
    try:
        train_on(policy, [Group("lone", make_groups(1)[0].trajectories[:1])], 3)
        error = None
    except TrainingError as caught:
        error = str(caught)
    close(engine)
    # One of two optimizer steps has a NaN.
    engine = make_engine(model, {"minibatches": 2})
    policy = PolicyTrainer(engine, AlgorithmConfig(), dump_dir=folder)
    half = make_groups(1, uniform=[3])
    first = half[0].trajectories[0]
    half[0].trajectories[0] = replace(first, logprobs=[float("nan"), *first.logprobs[1:]])
    half = train_on(policy, half, 1)
    close(engine)
    return {"uniform": uniform, "masked": masked, "unchanged": unchanged, "error": error, "half": half}
