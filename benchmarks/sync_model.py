"""Predicts the time of a shard-to-shard sync on a GPU cluster from the bytes in the real plan. Measures nothing.

    python benchmarks/sync_model.py [--nic 50] [--memory 2000] [CASE ...]

For each case the real planner places every byte of the model. The largest loads of a sender and a receiver then give

    stage  = max(bytes sent by the busiest trainer GPU, bytes received by an engine GPU) / link speed
    commit = 2 x bytes kept by an engine GPU / memory speed       (read the arena, write the parameters)

Link speed is that of one GPU's network card in GB/s (50 is 400 Gb/s), memory speed that of one GPU in GB/s. Latencies,
switches, packing (which overlaps) and failures are ignored, so the results are lower bounds. The model assumes that an
engine shards tensors as Megatron does with as many ranks, that all engines share one plan, and that the trainer sends
to all of them at the same time.
"""

from __future__ import annotations

import argparse
import time
from math import prod
from typing import Any, NamedTuple

from megasync.layout.engine_layout import EngineRank, Slot
from megasync.layout.layout import Layout
from megasync.layout.topology import Topology
from megasync.sync.shard.plan import ShardPlan, plan_shards

DTYPE = "bfloat16"
BUCKET_BYTES = 256 * 2**20


class Case(NamedTuple):
    """One model and cluster: `engine` is the topology of one engine, `engines` their number."""

    name: str
    config: dict[str, Any]
    trainer: Topology
    engine: Topology
    engines: int


def dense(kind: str, layers: int, hidden: int, inner: int, heads: int, groups: int, vocab: int, **more: Any) -> dict:
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab,
        "head_dim": 128,
        **more,
    }


def experts(layers: int, hidden: int, inner: int, heads: int, groups: int, count: int) -> dict:
    more = {"num_experts": count, "num_experts_per_tok": 8, "moe_intermediate_size": inner, "decoder_sparse_step": 1}
    return dense("qwen3_moe", layers, hidden, 4 * inner, heads, groups, 151936, mlp_only_layers=[], **more)


def latent(layers: int, heads: int, count: int, dense_layers: int, vocab: int) -> dict:
    """The configuration of DeepSeek-V3 and models with the same architecture."""
    more = {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": count,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": dense_layers,
    }
    return dense("deepseek_v3", layers, 7168, 18432, heads, heads, vocab, **more)


QWEN3_8B = dense("qwen3", 36, 4096, 12288, 32, 8, 151936)
QWEN3_32B = dense("qwen3", 64, 5120, 25600, 64, 8, 151936)
LLAMA_70B = dense("llama", 80, 8192, 28672, 64, 8, 128256)
QWEN3_30B_A3B = experts(48, 2048, 768, 32, 4, 128)
QWEN3_235B_A22B = experts(94, 4096, 1536, 64, 4, 128)
DEEPSEEK_V3 = latent(61, 128, 256, 3, 129280)
KIMI_K2 = latent(61, 64, 384, 1, 163840)

CASES = [
    Case("Qwen3-8B", QWEN3_8B, Topology(tensor=2, data=2), Topology(tensor=1), 4),
    Case("Qwen3-32B", QWEN3_32B, Topology(tensor=4, data=4), Topology(tensor=4), 4),
    Case("Llama-70B", LLAMA_70B, Topology(tensor=8, pipeline=4, data=2), Topology(tensor=8), 8),
    Case("Qwen3-30B-A3B", QWEN3_30B_A3B, Topology(2, 1, 8, expert=8, expert_tensor=1), Topology(tensor=4), 4),
    Case(
        "Qwen3-235B-A22B",
        QWEN3_235B_A22B,
        Topology(4, 8, 8, first_stage_layers=11, last_stage_layers=11, expert=16, expert_tensor=1),
        Topology(tensor=8, expert=8, expert_tensor=1),
        32,
    ),
    Case(
        "DeepSeek-V3",
        DEEPSEEK_V3,
        Topology(8, 16, 4, first_stage_layers=3, last_stage_layers=2, expert=32, expert_tensor=1),
        Topology(tensor=8, expert=8, expert_tensor=1),
        64,
    ),
    Case(
        "Kimi-K2",
        KIMI_K2,
        Topology(8, 16, 4, first_stage_layers=3, last_stage_layers=2, expert=32, expert_tensor=1),
        Topology(tensor=8, expert=8, expert_tensor=1),
        64,
    ),
]


def engine_ranks(config: dict[str, Any], topology: Topology) -> list[EngineRank]:
    """Engine ranks that keep the same shards as the ranks of a Megatron model with this topology."""
    layout = Layout(config, topology)
    ranks = []
    for rank in range(topology.world):
        slots, dtypes = [], {}
        for piece in layout.pieces(rank):
            stride = piece.param_box.cols
            offset = piece.param_box.row * stride + piece.param_box.col
            slots.append(Slot(piece.hf_name, piece.hf_box, piece.param, offset, stride, 1))
            dtypes[piece.param] = layout.hf_dtype(piece.hf_name, DTYPE)
        sizes = {name: prod(shape) for name, shape in layout.params(rank).items()}
        ranks.append(EngineRank(tuple(slots), (), dtypes, sizes))
    return ranks


def received(plan: ShardPlan) -> int:
    """Largest number of bytes that an engine rank receives."""
    return max(
        sum(bucket.nbytes for bucket in plan.buckets if bucket.target == rank) for rank in range(plan.engine_ranks)
    )


def row(case: Case, nic: float, memory: float) -> str:
    start = time.monotonic()
    layout = Layout(case.config, case.trainer)
    plan = plan_shards(layout, engine_ranks(case.config, case.engine), BUCKET_BYTES, DTYPE)
    sent = max(plan.sent_bytes().values()) * case.engines
    kept = received(plan)
    stage, commit = max(sent, kept) / (nic * 1e9), 2 * kept / (memory * 1e9)
    total = 2 * sum(a * (s[1] if len(s) > 1 else 1) for s in layout.hf_tensors.values() for a in s[:1])
    gpus = f"{case.trainer.world} + {case.engines} x {case.engine.world}"
    return (
        f"| {case.name} | {total / 1e9:.1f} | {gpus} | {sent / 1e9:.2f} | {kept / 1e9:.2f} | {stage:.2f} | "
        f"{commit * 1e3:.0f} | {time.monotonic() - start:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--nic", type=float, default=50.0, help="GB/s of one GPU's network card")
    parser.add_argument("--memory", type=float, default=2000.0, help="GB/s of one GPU's memory")
    args = parser.parse_args()
    unknown = set(args.cases) - {case.name for case in CASES}
    if unknown:
        parser.error(f"unknown case {min(unknown)!r}")
    print(
        "| model | GB | GPUs, trainer + engines | sent by the busiest, GB | kept by an engine GPU, GB | stage, s "
        "| commit, ms | planned in, s |\n|---|---|---|---|---|---|---|---|"
    )
    for case in CASES:
        if not args.cases or case.name in args.cases:
            print(row(case, args.nic, args.memory), flush=True)


if __name__ == "__main__":
    main()
