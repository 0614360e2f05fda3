"""Tensor-parallel ranks exchange tokens in Transformer Engine's buffers, with real Megatron and Transformer Engine.

The stand-in exchanges before it computes, and not meanwhile, so results are bitwise those of a run without buffers.
"""

import collections
from unittest import mock

import pytest
import torch
from family_layouts import PADDED, WHOLE, layout_of

from megasync.config.schema import Config, ModelConfig, TrainerConfig
from megasync.planning.memory import user_buffer_bytes

PLAIN = {"tensor_parallel": 2, "sequence_parallel": True, **PADDED, **WHOLE}
EXPERTS = {"expert_parallel": 2, "expert_tensor_parallel": 1}
CASES = [
    ("te 0.19.2", "qwen2_moe", 2, {**EXPERTS, "recompute": "full"}),
    ("te", "qwen3_moe", 2, EXPERTS),
    ("te", "qwen3", 2, {"fp8": "tensorwise"}),
]
ALL_CASES = [
    *((flavour, family, 2, {}) for flavour in ("te", "te 0.19.2") for family in ("qwen3", "glm4")),
    *((flavour, "gpt_oss", 2, EXPERTS) for flavour in ("te", "te 0.19.2")),
    ("te 0.19.2", "qwen3", 2, {"fp8": "tensorwise", "recompute": "full"}),
    ("te", "qwen3_moe", 2, {**EXPERTS, "fp8": "tensorwise"}),
    ("te", "llama", 4, {"data_parallel": 2}),
    ("te", "qwen3", 4, {"context_parallel": 2}),
    ("te", "qwen3_moe", 4, {**EXPERTS, "pipeline_parallel": 2, "virtual_pipeline": 2}),
]


@pytest.mark.parametrize(
    ("flavour", "family", "world", "options"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.matrix) for case in ALL_CASES)],
)
def test_exchanges_in_buffers_change_nothing(run_ranks, models, rows, tmp_path, flavour, family, world, options):
    ways = {"plain": {**PLAIN, **options}, "overlapped": {**PLAIN, **options, "tp_comm_overlap": True}}
    arguments = {"model": models[family], "rows": rows, "ways": ways, "folder": str(tmp_path)}
    trainer = TrainerConfig(**ways["overlapped"])
    config = Config(model=ModelConfig(dtype="bfloat16"), trainer=trainer)
    planned = user_buffer_bytes(config, layout_of(models[family], ways["overlapped"], "te"))
    for rank in run_ranks(in_user_buffers, world, flavour=flavour, **arguments):
        plain, overlapped = rank["plain"], rank["overlapped"]
        assert not plain["exchanges"]
        assert overlapped["exchanges"]["gather"] > 0 < overlapped["exchanges"]["scatter"]
        assert overlapped["lengths"] == {96}
        assert sum(overlapped["held"].values()) == planned
        assert not overlapped["open"], "buffers end with the engine"
        for name in ("scores", "after"):
            assert torch.equal(overlapped[name], plain[name])
        assert (overlapped["loss"], overlapped["grad_norm"]) == (plain["loss"], plain["grad_norm"])
        for name, gradient in plain["gradients"].items():
            assert torch.equal(overlapped["gradients"][name], gradient), name


def in_user_buffers(model, rows, ways, folder, dtype="bfloat16"):
    """`layouts`, with the exchanges of tokens in Transformer Engine's buffers in each, and what the buffers hold."""

    import transformer_engine_torch as tex
    from rank_engines import layouts
    from transformer_engine.pytorch.module import base

    found = {}
    for label, trainer in ways.items():
        exchanges = collections.Counter()

        def counted(name, exchanges=exchanges):
            exchange = getattr(tex.CommOverlap, name)

            def run(buffer):
                exchanges[name] += 1
                return exchange(buffer)

            return mock.patch.object(tex.CommOverlap, name, run)

        held = {}
        initialize = base.initialize_ub

        def noted(*args, held=held, initialize=initialize, **options):
            initialize(*args, **options)
            held.update({name: buffer.nbytes for (name, _), buffer in base._ub_communicators.items()})

        with counted("gather"), counted("scatter"), mock.patch.object(base, "initialize_ub", noted):
            result = layouts({"m": model}, rows, {label: trainer}, folder, dtype)["m", label]
        found[label] = {**result, "exchanges": dict(exchanges), "held": held, "open": base.is_ub_initialized()}
    return found
