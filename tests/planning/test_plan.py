"""A plan is computed from the configuration and printed in tables."""

import json
from dataclasses import replace
from io import StringIO
from math import prod
from pathlib import Path

import pytest
from rich.console import Console

from megasync.config import load_config
from megasync.errors import ConfigError
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.planning.memory import checkpoint_bytes, host_memory, server_memory, stage_memory
from megasync.planning.plan import Plan, TrainerPlan, resolve, resolve_plan, resolve_supervised
from megasync.planning.render import plan_tables
from megasync.preflight.check import check_config, model_layout
from megasync.tenants.checks import check_as_run

ROOT = Path(__file__).parents[2]
PLANS = Path(__file__).parent / "plans"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def load(name, *overrides):
    config = load_config(f"configs/{name}.yaml", overrides)
    check_config(config, planning=True)
    return config


def rendered(config, width: int = 110) -> str:
    return rendered_plan(resolve_plan(config), width)


def rendered_plan(plan: TrainerPlan, width: int = 110) -> str:
    text = StringIO()
    console = Console(file=text, width=width, color_system=None, legacy_windows=False)
    console.print(plan_tables(plan))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def test_the_plan_of_a_cluster_configuration_equals_the_stored_one():
    """If a change of the plan is intended, write the new text to tests/planning/plans/."""
    assert rendered(load("qwen3_32b_math")) == (PLANS / "qwen3_32b_math.txt").read_text(encoding="utf-8")


def test_one_node_is_shared_by_both_pools():
    plan = resolve_plan(load("qwen3_8b_math"))
    assert (plan.nodes, plan.trainer.nodes, plan.rollout.nodes) == (1, (0,), (0,))


def test_buffer_and_staleness_follow_the_schedule():
    plan = resolve_plan(load("qwen3_8b_math", "schedule.max_staleness=3", "schedule.weight_sync_steps=2"))
    assert plan.pacing.capacity == (3 + 1) * 64 * 2 == plan.max_inflight
    assert (plan.pacing.staleness_bound, plan.pacing.window_slack) == (3 + 2, 2)
    strict = resolve_plan(load("qwen3_8b_math", "schedule.window_fraction=null")).pacing
    assert (strict.staleness_bound, strict.window_slack) == (1, 0)
    assert resolve_plan(load("qwen3_8b_math", "schedule.max_inflight_groups=50")).max_inflight == 50


def test_parameters_are_those_of_the_public_models():
    """8.19 and 32.76 billion, as the model cards state."""
    assert round(resolve_plan(load("qwen3_8b_math")).parameters / 1e9, 2) == 8.19
    assert round(resolve_plan(load("qwen3_32b_math")).parameters / 1e9, 2) == 32.76


def test_the_sync_moves_every_weight_once():
    plan = resolve_plan(load("qwen3_8b_math"))
    assert plan.broadcast.nbytes == plan.parameters * 2
    assert resolve_plan(load("qwen3_32b_math")).broadcast.senders == (0, 8)


# Bytes of the largest message of a weight sync.
BUCKET = 10**9


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}


def layout_of(config):
    return model_layout(config, planning=True)[0]


def elements_of(layout, words=""):
    """Elements of the parameters on rank 0 whose names contain these words."""
    return sum(prod(shape) for name, shape in layout.params(0).items() if words in name)


def of_rank(*overrides):
    """A configuration, its layout and the memory of its first rank."""
    config = load("qwen3_8b_math", *overrides)
    layout = layout_of(config)
    return config, layout, stage_memory(config, layout, BUCKET, 0)


def activations(*overrides) -> int:
    return of_rank(*overrides)[2].activations


@pytest.fixture
def experts(tmp_path):
    """Overrides for a model of another shape and without sequence parallelism, on these ranks."""

    def changed(values=EXPERTS, model="qwen3_8b", **sizes):
        shape = json.loads((ROOT / f"configs/models/{model}.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(shape | values))
        ranks = {"tensor": 1, "data": 4} | sizes
        split = [f"trainer.{name}_parallel={size}" for name, size in ranks.items()]
        return [f"model.config={tmp_path / 'config.json'}", *split, "trainer.sequence_parallel=false"]

    return changed


def test_a_rank_holds_weights_gradients_and_its_share_of_the_optimizer():
    config, layout, memory = of_rank("trainer.tensor_parallel=2", "trainer.data_parallel=2")
    elements = elements_of(layout)
    assert (memory.weights, memory.gradients, memory.sync_buckets) == (2 * elements, 4 * elements, 2 * BUCKET)
    assert memory.optimizer == 12 * elements // 2  # float32 weights and two moments, over two data-parallel ranks
    config.trainer.distributed_optimizer = False
    assert stage_memory(config, layout, BUCKET, 0).optimizer == 12 * elements
    # Float32 weights need no second copy.
    assert of_rank("model.dtype=float32")[2].optimizer == 8 * elements_of(of_rank("model.dtype=float32")[1])


def test_states_of_the_optimizer_are_counted_in_their_dtypes():
    """On a device, in checkpoints, which have whole main weights, and on the host of a run that shares devices."""
    states = ["exp_avg_dtype=bfloat16", "exp_avg_sq_dtype=bfloat16", "store_param_remainders=true"]
    plain, short = (load("qwen3_8b_math", *overrides) for overrides in ((), [f"trainer.optimizer.{x}" for x in states]))
    layout = layout_of(plain)
    elements = elements_of(layout)
    assert stage_memory(plain, layout, BUCKET, 0).optimizer == 12 * elements
    assert stage_memory(short, layout, BUCKET, 0).optimizer == 6 * elements
    assert checkpoint_bytes(short, layout) * 14 == checkpoint_bytes(plain, layout) * 10
    for config in (plain, short):
        config.cluster.colocate = True
    offloaded = [host_memory(config, layout, 1, 0).offloaded for config in (plain, short)]
    assert offloaded == [12 * elements, 6 * elements]


def test_a_share_of_the_optimizer_is_on_the_host():
    """There with gradients, in pinned memory that torch rounds up to twice as much. Checkpoints stay what they are."""
    plain, half, whole = (load("qwen3_8b_math", f"trainer.optimizer.offload={share}") for share in (0, 0.5, 1))
    layout = layout_of(plain)
    elements = elements_of(layout)
    assert [stage_memory(each, layout, BUCKET, 0).optimizer for each in (plain, half, whole)] == [
        12 * elements,
        6 * elements,
        0,
    ]
    hosts = [host_memory(each, layout, 2, 0) for each in (plain, half, whole)]
    # The parameter with which the share is reached is offloaded whole.
    largest = max(prod(shape) for shape in layout.params(0).values())
    assert [host.optimizer for host in hosts] == [0, 2 * (10 * elements + 20 * largest), 2 * 20 * elements]
    assert hosts[2].total - hosts[0].total == 2 * 20 * elements
    assert checkpoint_bytes(whole, layout) == checkpoint_bytes(plain, layout)
    assert "for the optimizer's state that is updated there" in " ".join(rendered(half).split())
    for config in (plain, half, whole):
        config.cluster.colocate = True
    assert [host_memory(each, layout, 1, 0).offloaded for each in (plain, half, whole)] == [
        12 * elements,
        6 * elements,
        0,
    ]


def test_a_critic_offloads_its_own_share():
    critic = ["critic.enabled=true", "algorithm.advantage=gae"]
    plain, own = (
        load("qwen3_8b_math", *critic, f"critic.optimizer.offload={share}", "trainer.optimizer.offload=0.5")
        for share in (0, 1)
    )
    layout = layout_of(plain)
    critic = Layout(layout.hf_config, layout.topology, layout.spec, value_head=True)
    elements = sum(prod(shape) for shape in critic.params(0).values())
    critics = [stage_memory(config, layout, BUCKET, 0).critic for config in (plain, own)]
    assert critics == [(2 + 4 + 12) * elements, (2 + 4) * elements]
    hosts = [host_memory(config, layout, 1, 0).optimizer for config in (plain, own)]
    assert hosts[1] - hosts[0] == 20 * elements


def test_a_critic_adds_a_model_without_an_output_layer():
    """With turns on the device, gradients and optimizer of one of the two models are on the host."""
    critic = ["critic.enabled=true", "algorithm.advantage=gae"]
    plain, beside, turns = (
        load("qwen3_8b_math", *overrides) for overrides in ((), critic, [*critic, "critic.offload=true"])
    )
    layout = layout_of(plain)
    elements = elements_of(layout)
    own = elements - layout.padded_vocab // layout.topology.tensor * layout.sizes.hidden + layout.sizes.hidden + 1
    assert stage_memory(plain, layout, BUCKET, 0).critic == 0
    assert stage_memory(beside, layout, BUCKET, 0).critic == (2 + 4 + 12) * own
    assert stage_memory(turns, layout, BUCKET, 0).critic == 2 * own
    assert host_memory(beside, layout, 1, 0).offloaded == 0
    assert host_memory(turns, layout, 1, 0).offloaded == 12 * elements
    assert "critic" in rendered(beside) and "critic" not in rendered(plain)
    copies = [host_memory(config, layout, 1, 0).checkpoint for config in (plain, beside)]
    assert copies[0] < copies[1] < 2 * copies[0]
    assert checkpoint_bytes(plain, layout) < checkpoint_bytes(beside, layout) < 2 * checkpoint_bytes(plain, layout)


def test_routes_that_are_replayed_take_memory(experts):
    """48 layers of 8 experts, one byte each; servers report four, in base64."""
    # Of the experts, only those that a token chooses: a plan of all 128 takes a minute.
    model = experts({"num_experts": 8}, "qwen3_30b_a3b")[0]
    plain, routed = (load("qwen3_8b_math", model, f"rollout.routing_replay={on}") for on in ("false", "true"))
    assert "384 B a token of prompts and responses" in rendered(routed)
    assert "servers report 2.0 kB a token" in " ".join(rendered(routed).split())
    assert "routing replay" not in rendered(plain)


def test_experts_are_distributed_over_their_own_ranks(experts):
    _, layout, memory = of_rank(*experts(expert=2))
    held, elements = elements_of(layout, ".experts."), elements_of(layout)
    assert held == 36 * 4 * 3 * 768 * 4096 and memory.weights == 2 * elements
    # Each expert has two copies, everything else four.
    assert memory.optimizer == 12 * (held // 2 + (elements - held) // 4)


def test_recomputation_sequence_parallelism_and_small_batches_reduce_activations():
    full = activations("trainer.recompute=full")
    assert full < activations() / 5
    # Of 36 layers.
    assert full < activations("trainer.recompute=full", "trainer.recompute_layers=18") < 0.6 * activations()
    assert activations("trainer.recompute=selective", "trainer.recompute_modules=[mlp]") < 0.6 * activations()
    assert activations() < activations("trainer.sequence_parallel=false")
    # Up to the rounding of response tokens.
    assert activations("trainer.tokens_per_microbatch=32768") == pytest.approx(2 * activations(), rel=1e-4)


def test_padded_microbatches_and_buffers_of_overlapped_exchanges_are_counted():
    tokens, pad = "trainer.tokens_per_microbatch=16390", "trainer.pad_microbatches=true"
    config, _, padded = of_rank(tokens, pad)
    # A multiple of the four tensor-parallel ranks.
    assert padded.activations / activations(tokens) == pytest.approx(16392 / 16390, rel=1e-5)
    assert "in microbatches of 16392 tokens per rank" in rendered(config)
    overlap, fp8 = "trainer.tp_comm_overlap=true", "trainer.fp8=tensorwise"
    assert activations(tokens, pad, overlap) - padded.activations == 24 * 16392 * 4096
    added = activations(tokens, pad, fp8, overlap) - activations(tokens, pad, fp8)
    assert added % (16 * 4096) == 0 and added >= 16 * 16390 * 4096


def test_memory_of_graphs_is_counted():
    pad, graphs = "trainer.pad_microbatches=true", "trainer.cuda_graphs=true"
    fused, apart = (f"trainer.gradient_accumulation_fusion={on}" for on in ("true", "false"))
    config, layout, plain = of_rank(pad, fused)
    captured = activations(pad, fused, graphs)
    # Three hidden states of each token and layer, on four ranks that split the tokens.
    assert captured - plain.activations == 3 * 36 * config.trainer.tokens_per_microbatch * 4096 * 2 // 4
    assert activations(pad, apart, graphs) - captured == 2 * elements_of(layout, ".layers.")


def test_a_kl_term_takes_two_blocks_of_the_model():
    """The embedding is the largest block; on the last rank the output layer is as large."""
    plan = resolve_plan(load("qwen3_32b_math", "algorithm.kl_coef=0.01"))
    rows = plan_layout_rows(plan)
    assert [stage.reference for stage in plan.stages] == [2 * rows * 5120 * 2] * 2
    assert all(stage.total > stage.reference + stage.weights for stage in plan.stages)
    assert "initial weights in host memory, at most 4.1 GB a rank" in rendered(
        load("qwen3_32b_math", "algorithm.kl_coef=0.01"), width=400
    )
    assert resolve_plan(load("qwen3_32b_math")).stages[0].reference == 0


def plan_layout_rows(plan):
    """Rows of the embedding that one tensor rank holds."""
    tensor = max(rank.coords.tp for rank in plan.ranks) + 1
    return -(-plan.layout.sizes.vocab // (64 * tensor)) * 64


def test_experts_take_copies_of_tokens_and_more_on_the_busiest_rank(experts):
    """Bytes per token of one expert layer, by hand: 8 experts, 2 per token; the busiest rank gets twice the mean.

    Attention with norms of queries and keys saves queries and keys twice, values and the output once.
    """
    hidden, attention = 4096, 2 * (4096 + 1024) + 1024 + 4096
    for expert, received in ((1, 2), (4, 4)):
        one_layer = experts(EXPERTS | {"num_hidden_layers": 1}, expert=expert)
        config, _, memory = of_rank(*one_layer, "trainer.recompute=null")
        # At the end the final norm's input.
        saved = 4 * hidden + attention + received * (hidden + 3 * 768) + hidden
        per_token = memory.activations / config.trainer.tokens_per_microbatch
        assert per_token == pytest.approx(2 * (saved + 2 * received * hidden + 2 * hidden), rel=1e-4)


def test_the_kv_cache_takes_the_memory_beside_the_weights():
    config = load("qwen3_8b_math")
    layout = layout_of(config)
    memory = server_memory(config, layout, 100 * 10**9)
    assert memory.kv_bytes_per_token == 2 * 36 * 8 * 128 * 2
    assert memory.kv_tokens == (85 * 10**9 - memory.weights) // memory.kv_bytes_per_token
    config.rollout.max_total_tokens = 5000
    for device_bytes in (None, 100 * 10**9):
        assert server_memory(config, layout, device_bytes).kv_tokens == 5000
    assert server_memory(config, layout, 20 * 10**9).kv_tokens == 4194


def test_attention_groups_repeat_the_weights_and_keys_of_attention():
    config = load("qwen3_8b_math")
    layout = layout_of(config)
    config.rollout.tensor_parallel = 4
    whole = server_memory(config, layout, 80 * 10**9)
    config.rollout.attention_data_parallel = 2
    grouped = server_memory(config, layout, 80 * 10**9)
    assert grouped.kv_bytes_per_token == 2 * whole.kv_bytes_per_token
    groups = ("self_attn", "embed_tokens")
    copied = sum(prod(s) * 2 for name, s in layout.hf_tensors.items() if any(word in name for word in groups))
    assert grouped.weights - whole.weights == copied // 4


def test_a_token_budget_below_one_sequence_gives_a_warning():
    plan = resolve_plan(load("qwen3_8b_math", "trainer.tokens_per_microbatch=1024"))
    assert "tokens_per_microbatch=1024" in " ".join(plan.warnings) and plan.refusals == ()


def test_a_pipeline_stage_has_the_layers_and_keys_and_values_of_its_part():
    config = load("qwen3_8b_math")
    layout = layout_of(config)

    def server(stages):
        split = replace(config, rollout=replace(config.rollout, pipeline_parallel=stages))
        return server_memory(split, layout, 80 * 10**9)

    whole, half, third = (server(stages) for stages in (1, 2, 3))
    outside = sum(prod(shape) for name, shape in layout.hf_tensors.items() if ".layers." not in name) * 2
    assert half.weights == outside + (whole.weights - outside) // 2
    assert third.weights == outside + (whole.weights - outside) // 3
    assert half.kv_bytes_per_token * 2 == whole.kv_bytes_per_token == third.kv_bytes_per_token * 3
    # 36 layers over 5 stages: the fullest has 8.
    assert server(5).kv_bytes_per_token * 36 == whole.kv_bytes_per_token * 8


def test_a_staging_area_on_the_device_takes_server_memory():
    def arena(*overrides):
        config = load("qwen3_8b_math", *overrides)
        return server_memory(config, layout_of(config), 80 * 10**9)

    assert arena().arena == 0
    kept = arena("sync.arena=device")
    assert kept.arena == kept.weights
    assert arena("sync.arena=device", "sync.arena_mb=100").arena == 100 * 2**20
    assert arena("sync.transport=broadcast").arena == 0


def test_host_memory_of_a_node_has_the_copy_of_a_checkpoint_and_what_servers_stage():
    config = load("qwen3_8b_math")
    host = resolve_plan(config).host
    assert host.checkpoint == pytest.approx(checkpoint_bytes(config, layout_of(config)), rel=0.001)
    assert (host.reference, host.staging) == (0, 4 * server_memory(config, layout_of(config), None).weights)
    kept = resolve_plan(load("qwen3_8b_math", "algorithm.kl_coef=0.1", "sync.arena=device"), 100 * 10**9).host
    assert kept.reference == 4 * stage_memory(config, layout_of(config), BUCKET, 0).weights
    assert kept.staging == 0
    # Trainer ranks and servers have nodes of their own: the larger sum counts. Data-parallel ranks share the state.
    apart = resolve_plan(load("qwen3_32b_math", "sync.transport=broadcast"))
    assert 0 < apart.host.checkpoint < checkpoint_bytes(apart.config, apart.layout)
    assert apart.host.staging == 0


def test_ranks_have_expert_coordinates(experts):
    config = load("qwen3_8b_math", *experts(tensor=2, data=2, expert=2, expert_tensor=1)[:-1])
    assert [rank.experts[:2] for rank in resolve_plan(config).ranks] == [(0, 0), (0, 1), (0, 0), (0, 1)]
    assert "│ 2-3   │ 0    │ 0-1    │ 1    │ 0        │ 0-1    │ 0             │ 0-35   │" in rendered(config)


def test_a_cpu_run_has_no_device_memory_limit():
    config = load("qwen3_8b_math", "cluster.device=cpu")
    assert resolve_plan(config).device_bytes is None
    with pytest.raises(ConfigError, match="--device-memory"):
        resolve_plan(config, 10**9)
    # Room for one sequence, which is more than a gibibyte here, instead of a share of the memory that is free.
    assert resolve_plan(config).server.kv_tokens == config.rollout.context_length == 12288
    assert "null on a CPU" in " ".join(rendered(config).split())


def test_tied_embeddings_over_two_stages_are_counted_twice_in_memory_and_once_in_the_model():
    values = {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "tie_word_embeddings": True,
    }
    config = load("qwen3_8b_math", "trainer.tensor_parallel=1", "trainer.sequence_parallel=false")
    layout = Layout(values, Topology(pipeline=2))
    config.trainer.pipeline_parallel = 2
    held = sum(stage_memory(config, layout, BUCKET, stage).weights for stage in range(2))
    assert held - sum(prod(s) for s in layout.hf_tensors.values()) * 2 == 128 * 64 * 2


def test_the_plan_shows_rollout_workers_and_warns_about_idle_ones():
    config = load("qwen3_8b_math", "rollout.workers=4")
    assert "4 processes on 1 node(s) of the rollout pool" in rendered(config, width=400)
    assert "idle" not in " ".join(resolve_plan(config).warnings)
    config.rollout.workers = 100_000
    assert "rollout.workers=100000 exceeds the" in " ".join(resolve_plan(config).warnings)
    assert "rollout workers" not in rendered(load("qwen3_8b_math"), width=400)


def supervised(*overrides) -> TrainerPlan:
    rows = "sft.train={kind: jsonl, source: absent.jsonl}"
    config = load_config("configs/qwen3_8b_math.yaml", [rows, *overrides])
    check_as_run(config, planning=True)
    return resolve_supervised(config)


def test_a_supervised_run_is_planned_without_servers_buffer_and_data():
    plan = supervised("data.train=null", "sft.rows_per_step=128", "sft.epochs=2", "sft.max_tokens=4096")
    assert (plan.nodes, len(plan.ranks)) == (1, 4)
    text = rendered_plan(plan)
    assert "supervised (`megasync sft`), because sft.train is set" in text
    assert "128 rows, in microbatches of at most 16384 tokens per rank" in text
    assert "at most 4096 tokens each (sft.max_tokens), 2 epoch(s)" in text
    assert "4 trainer rank(s) on node(s) 0, no servers" in text
    assert not any(word in text for word in ("staleness", "weight sync", "buckets", "KV room", "rollout"))


def test_a_supervised_rank_holds_nothing_of_reinforcement_learning():
    (alone,) = supervised("sft.max_tokens=4096").stages
    extras = ("algorithm.kl_coef=0.1", "critic.enabled=true", "algorithm.advantage=gae")
    (beside,) = supervised("sft.max_tokens=4096", *extras).stages
    assert alone == beside
    assert (alone.reference, alone.critic, alone.sync_buckets) == (0, 0, 0)
    trained = resolve_plan(load("qwen3_8b_math")).stages[0]
    assert (alone.weights, alone.gradients, alone.optimizer) == (trained.weights, trained.gradients, trained.optimizer)


def test_adapters_of_a_supervised_run_are_not_merged_for_servers():
    (rank,) = supervised("trainer.lora.rank=8", "sft.max_tokens=4096").stages
    (kept,) = resolve_plan(load("qwen3_8b_math", "trainer.lora.rank=8", "sync.transport=adapters")).stages
    assert rank.weights == kept.weights


def test_long_rows_take_memory_and_may_not_fit():
    """Without sft.max_tokens a row may be as long as the model's context."""
    short, long = supervised("sft.max_tokens=4096"), supervised()
    assert long.stages[0].activations > short.stages[0].activations and not short.warnings
    assert "the longest sequence (40960 tokens) exceeds" in long.warnings[0]
    (refusal,) = supervised("trainer.recompute=null", "trainer.data_parallel=1").refusals
    assert "pipeline stage 0 needs about" in refusal and "server" not in refusal


def test_a_supervised_run_over_nodes_needs_a_cluster():
    with pytest.raises(ConfigError, match="lower trainer.data_parallel, or join a cluster of 4 nodes"):
        supervised("trainer.data_parallel=8", "sft.max_tokens=4096")


def test_a_service_is_planned_without_data_buffer_and_algorithm():
    config = load_config("configs/serve_qwen3_8b.yaml", ["serve.port=0", "schedule.max_staleness=3"])
    check_as_run(config, planning=True)
    text = rendered_plan(resolve(config), 400)
    assert "a training service (`megasync serve`), because serve is set" in text
    assert "of rank 64 at most, of all projections and the output layer: 184.6M parameters" in text
    assert "127.0.0.1, port any, by plain HTTP; one tenant, whose key is drawn" in text
    assert "at most 16 models in memory, 64 adapters on servers, 200 GB on disk, 10,000 requests" in text
    assert "at most 16384 tokens, in microbatches of at most 16384 tokens per rank" in text
    assert "4 rank(s)" in text and "4 server(s)" in text
    assert not any(word in text for word in ("staleness", "weight sync", "buffer", "responses"))


def test_a_service_needs_memory_for_models_that_wait_and_for_adapters_on_servers():
    config = load_config("configs/serve_qwen3_8b.yaml")
    plan, twice = (resolve(load_config("configs/serve_qwen3_8b.yaml", more)) for more in ([], ["serve.models=32"]))
    assert isinstance(plan, Plan) and plan.adapters is not None
    elements = sum(prod(shape) for shape in plan.adapters.hf_tensors.values())
    assert plan.server.adapters == 9 * elements * 2
    run = replace(config, serve=None, sync=replace(config.sync, transport="adapters"))
    assert plan.server.kv_room + plan.server.adapters == pytest.approx(resolve_plan(run).server.kv_room, abs=1e6)
    assert twice.host.models == 2 * plan.host.models > 0
    # Two sums in float32, and adapters and bfloat16 gradients of the eight models that share a microbatch.
    of_rank = max(sum(map(prod, plan.adapters.params(rank).values())) for rank in range(4))
    assert max(stage.gradients for stage in plan.stages) == of_rank * (2 * 4 + 8 * 2 * 2)
    assert plan.host.adapters == 4 * 16 * elements * 2
