"""The deviations that CPU servers need, and that they are still needed. Each check runs in a process of its own,
because the stand-ins must never be importable in ours."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from megasync.serving.server import MODEL_PACKAGE, stand_ins_path

pytestmark = pytest.mark.processes

ENV = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def python(code: str, stand_ins: bool, **more: str) -> subprocess.CompletedProcess:
    env = dict(os.environ) | ENV | more
    if stand_ins:
        env["PYTHONPATH"] = stand_ins_path()
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.matrix
@pytest.mark.skipif(find_spec("triton") is not None, reason="the real triton is installed")
def test_sglang_still_does_not_start_without_the_stand_ins():
    result = python("import sglang.srt.entrypoints.http_server", stand_ins=False)
    assert result.returncode != 0
    assert "triton" in result.stderr or "torchvision" in result.stderr or "sgl_kernel" in result.stderr


LAUNCH = """
import inspect, multiprocessing, sys, torch
from megasync.base.importing import quick_imports
with quick_imports():
    from sglang.srt.arg_groups.choices import DETERMINISTIC_ATTENTION_BACKEND_CHOICES as backends
    from sglang.srt.debug_utils import dumper
    from sglang.srt.entrypoints import engine, http_server
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.lora.backend import torch_backend
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
    from sglang.srt.models import llama4, mllama4, qwen2_classification, qwen3_classification
    from sglang.srt.models.deepseek_common import attention_backend_handler as latent
    from sglang.srt.models.registry import ModelRegistry
    import sglang.srt.batch_invariant_ops as batch_invariant_ops
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as with_towers
    from megasync.layout.families import FAMILIES
    from megasync_patches.sglang_cpu_launch import PATCH

PATCH.needed()
# Still needed: upstream spawns, does not admit torch_native and treats it as triton in latent attention, wants an
# accelerator, asks a port that is not open.
assert "torch_native" not in backends
assert latent.AttentionBackendRegistry.get_handler("torch_native") is latent.handle_attention_triton
assert 'set_start_method("spawn"' in inspect.getsource(engine._set_envs_and_config)
assert "/freeze_gc" in inspect.getsource(http_server._freeze_gc_after_server_warmup)
# Its dumper, which the scheduler needs, imports Megatron where that is installed.
assert dumper._MegatronPlugin._available
# Of attention groups it cannot pad the batches, and lets idle ranks sleep for a second.
assert not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value")
assert "poll(1000)" in inspect.getsource(IdleSleeper.maybe_sleep)
# Of the rows that the output layer computes, it does not know which belong to which adapter
# (megasync_patches.sglang_cpu_lora_head).
assert "pruned_batch_info" not in inspect.getsource(torch_backend)
for module in (qwen2_classification, qwen3_classification):
    # A head with a bias, which Hugging Face's classifiers of these families lack (megasync_patches.sglang_score_bias).
    assert "self.score = nn.Linear(config.hidden_size, config.num_labels)\\n" in inspect.getsource(module)
# Of Llama 4 rotated queries and keys are dropped unless they are rotated in place, and experts are refused
# (megasync_patches.sglang_cpu_llama4). Its language model alone rotates halves of heads and has no loader of experts;
# beside a tower its class is imported while the whole is built, and rows are reordered while it is loaded
# (megasync.sglang.models.llama4).
attention = inspect.getsource(llama4.Llama4Attention)
assert "q_out_unused, k_out_unused" in attention and ".bfloat16()" in attention and "is_neox_style = True" in attention
assert "if moe_runner_config.apply_router_weight_on_input:\\n        raise" in inspect.getsource(fused_moe_native)
assert "load_weights" not in vars(llama4.Llama4ForCausalLM)
assert "experts" not in inspect.getsource(llama4.Llama4ForCausalLM._legacy_load_weights)
with_tower = mllama4.Llama4ForConditionalGeneration
assert "from sglang.srt.models.llama4 import Llama4ForCausalLM" in inspect.getsource(with_tower.__init__)
assert "self.permute_qk_weight_for_rotary(" in inspect.getsource(with_tower.load_weights)
try:
    batch_invariant_ops.enable_batch_invariant_mode()
except RuntimeError as error:
    assert "accelerator" in str(error)
else:
    raise AssertionError("batch-invariant mode works on a CPU now")

PATCH.apply()
PATCH.apply()
assert backends.count("torch_native") == 1
assert latent.AttentionBackendRegistry.get_handler("torch_native")(None, None) is latent.AttnForwardMethod.MLA
batch_invariant_ops.enable_batch_invariant_mode()
batch_invariant_ops.enable_batch_invariant_mode()
rows, matrix, bias = torch.randn(64, 96), torch.randn(128, 96), torch.randn(128)
for product in (lambda rows: rows @ matrix.T, lambda rows: torch.nn.functional.linear(rows, matrix, bias)):
    with torch.inference_mode():
        whole = product(rows)
        assert all(torch.equal(product(rows[:count]), whole[:count]) for count in range(1, 65))
torch.testing.assert_close(whole, (rows.double() @ matrix.double().T + bias).float())
print("rows are alone")
http_server._freeze_gc_after_server_warmup(None)
from sglang.srt.server_args import ServerArgs
engine._set_envs_and_config(ServerArgs(model_path="dummy"))
print("start method", multiprocessing.get_start_method())

architectures = [(with_towers if FAMILIES[kind].vision else names)[kind] for kind in FAMILIES if kind != "kimi_k2"]
architectures += ["Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification"]
for architecture in architectures:
    assert ModelRegistry.resolve_model_cls([architecture])[1] == architecture
assert "sglang.srt.models.gpt2" not in sys.modules
print("another model", ModelRegistry.resolve_model_cls(["GPT2LMHeadModel"])[0].__module__)
"""


@pytest.fixture(scope="module")
def launched() -> subprocess.CompletedProcess:
    return python(LAUNCH, stand_ins=True, SGLANG_EXTERNAL_MODEL_PACKAGE=MODEL_PACKAGE)


@pytest.mark.matrix
def test_the_launcher_is_still_needed_and_does_what_it_says(launched):
    assert "start method fork" in launched.stdout, launched.stderr[-3000:]


@pytest.mark.matrix
def test_a_row_of_a_product_does_not_depend_on_the_others_with_deterministic_inference(launched):
    assert "rows are alone" in launched.stdout, launched.stderr[-3000:]


@pytest.mark.matrix
def test_sglang_imports_only_the_model_that_it_serves_and_still_finds_all_others(launched):
    assert "another model sglang.srt.models.gpt2" in launched.stdout, launched.stderr[-3000:]


ATTENTION = """
import inspect, torch
from megasync.base.importing import quick_imports
with quick_imports():
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from megasync_patches.sglang_cpu_launch import attend_together

torch.manual_seed(0)
one_by_one = TorchNativeAttnBackend._run_sdpa_forward_decode
assert "for seq_idx in range" in inspect.getsource(one_by_one), "upstream decodes requests together now"
backend = TorchNativeAttnBackend.__new__(TorchNativeAttnBackend)
for heads, key_heads, window in ((9, 3, None), (4, 4, None), (8, 1, 5)):
    lengths = torch.tensor([7, 1, 30, 12])
    keys, values = torch.randn(2, 200, key_heads, 16)
    tokens = torch.randperm(200)[: 4 * 40].view(4, 40)
    requests = torch.tensor([2, 0, 3, 1])
    query = torch.randn(4, heads, 16)
    arguments = (keys, values, tokens, requests, lengths)
    options = dict(scaling=0.3, enable_gqa=heads != key_heads, sliding_window_size=window)
    expected = one_by_one(backend, query, torch.empty_like(query), *arguments, **options)
    output = torch.empty_like(query)
    assert attend_together(query, output, *arguments, **options) is output
    torch.testing.assert_close(output, expected)
long = torch.tensor([9000, 1, 1, 1])
assert attend_together(query, output, keys, values, tokens, requests, long) is None, "padding would cost too much"
print("attention is equal")
"""


KERNELS = """
import torch, sgl_kernel, triton, triton.language as tl, torchvision
from triton.runtime.cache import anything
hashed = torch.ops.sgl_kernel.murmur_hash32_cpu.default(
    torch.tensor([0, 42, 2**63 + 5], dtype=torch.uint64), torch.tensor([0, 7, 9]), torch.tensor([0, 1, 1000])
)
print(hashed.tolist())

@triton.jit
def kernel(x, BLOCK: tl.constexpr): ...

try:
    kernel[(1,)](1, BLOCK=2)
except RuntimeError as error:
    print(error)
try:
    sgl_kernel.rmsnorm(1, 2)
except RuntimeError as error:
    print(error)
"""


def murmur3(words: list[int]) -> int:
    """MurmurHash3 x86 32 bit over little-endian 4-byte words, seed 0, one word after the other."""
    mask, h = 0xFFFFFFFF, 0
    for word in words:
        k = word * 0xCC9E2D51 & mask
        k = (k << 15 | k >> 17) & mask
        h ^= k * 0x1B873593 & mask
        h = (h << 13 | h >> 19) & mask
        h = (h * 5 + 0xE6546B64) & mask
    h ^= 4 * len(words)
    h ^= h >> 16
    h = h * 0x85EBCA6B & mask
    h ^= h >> 13
    h = h * 0xC2B2AE35 & mask
    return h ^ h >> 16


@pytest.fixture(scope="module")
def computed() -> subprocess.CompletedProcess:
    return python(ATTENTION + KERNELS, stand_ins=True)


def test_attention_of_a_decoded_batch_is_that_of_its_requests_one_by_one(computed):
    assert "attention is equal" in computed.stdout, computed.stderr[-3000:]


def test_stand_ins_refuse_calls_by_name_and_hash_for_real(computed):
    hashed, kernel, operation = computed.stdout.partition("attention is equal\n")[2].splitlines()
    # Two published test vectors anchor the reference: the 4-byte words 0 and 0x87654321 with seed 0.
    assert murmur3([0]) == 0x2362F9DE
    assert murmur3([0x87654321]) == 0xF55B516B
    seeds, positions, columns = [0, 42, 2**63 + 5], [0, 7, 9], [0, 1, 1000]
    expected = [
        [murmur3([seed & 0xFFFFFFFF, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashed == str(expected)
    assert "kernel" in kernel and "stand-in" in kernel
    assert "sgl_kernel.rmsnorm" in operation and "stand-in" in operation
