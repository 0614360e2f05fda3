"""A folder in block FP8 is served as the weights that the trainer loads from it, and as SGLang dequantizes them."""

import subprocess
import sys

import pytest
import torch
from fp8_folders import quantize, write_fp8
from real_servers import checksums, make_server
from safetensors.torch import load_file, save_file
from tiny_models import make_tiny_model

from megasync.layout.block_fp8 import Block, block_maxima, dequantize, scales_of
from megasync.layout.block_fp8 import quantize as quantize_box
from megasync.layout.layout import Box
from megasync.serving.control import ServerControl

pytestmark = pytest.mark.real

SHAPE, BLOCK = (300, 200), Block(128, 128)
SGLANG = """
import sys, torch
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
held = load_file(sys.argv[1])
dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
save_file({n: block_quant_dequant(held["x"], held["s"], [128, 128], t) for n, t in dtypes.items()}, sys.argv[2])
"""
# Quantizes x, [rows, columns], and tries what a server does to loaded weights of a layer.
QUANTIZER = """
import sys
from types import SimpleNamespace
from safetensors.torch import load_file, save_file
from sglang.srt.layers.quantization.fp8 import Fp8LinearMethod
from sglang.srt.layers.quantization.fp8_utils import per_block_cast_to_fp8
values, scales = per_block_cast_to_fp8(load_file(sys.argv[1])["x"])
save_file({"values": values, "scales": scales.contiguous()}, sys.argv[2])
method = SimpleNamespace(w8a8_block_fp8_linear=None, convert_mxfp8_to_block=False, use_mxfp8=False)
try:
    Fp8LinearMethod.process_weights_after_loading_block_quant(method, SimpleNamespace())
except AssertionError as error:
    print(error)
"""


def test_sglang_quantizes_to_the_same_bits_and_needs_amx_on_a_cpu(tmp_path):
    weight = (torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    save_file({"x": weight}, tmp_path / "in")
    env = make_server(tmp_path, tmp_path / "log", 1).environment()
    command = [sys.executable, "-c", QUANTIZER, tmp_path / "in", tmp_path / "out"]
    printed = subprocess.run(command, env=env, check=True, timeout=180, capture_output=True, text=True).stdout
    # Why megasync_patches.sglang_cpu_block_fp8 exists.
    assert "requires that CPU has AMX support" in printed
    theirs, whole = load_file(tmp_path / "out"), Box(0, 300, 0, 200)
    scales = scales_of(block_maxima(weight, whole, BLOCK), power_of_two=True)
    assert torch.equal(scales, theirs["scales"])
    values = quantize_box(weight, scales, whole, BLOCK)
    assert torch.equal(values.contiguous().view(torch.uint8), theirs["values"].view(torch.uint8))


async def test_a_server_of_block_fp8_holds_the_dequantized_weights(tmp_path):
    source = make_tiny_model(tmp_path / "source", "qwen3_moe", tokenizer=False)
    fp8, plain = write_fp8(source, tmp_path / "fp8", tmp_path / "plain", (20, 28), torch.bfloat16)
    engine = make_server(fp8, tmp_path / "log", 1)
    server = ServerControl(await engine.start(180))
    try:
        loaded = await checksums(server)
        await server.post("/update_weights_from_disk", {"model_path": str(source)}, timeout=300)
        assert await checksums(server) != loaded
        await server.post("/update_weights_from_disk", {"model_path": str(plain)}, timeout=300)
        assert await checksums(server) == loaded
    finally:
        await server.close()
        await engine.stop()


def test_sglang_dequantizes_to_the_same_bits(tmp_path):
    values, scales = quantize(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)), BLOCK)
    save_file({"x": values, "s": scales}, tmp_path / "in")
    env = make_server(tmp_path, tmp_path / "log", 1).environment()
    subprocess.run([sys.executable, "-c", SGLANG, tmp_path / "in", tmp_path / "out"], env=env, check=True, timeout=180)
    theirs = load_file(tmp_path / "out")
    ours = dequantize(values, scales, Box(0, 300, 0, 200), BLOCK)
    assert theirs["float32"].dtype == torch.float32 and torch.equal(theirs["float32"], ours)
    assert theirs["bfloat16"].dtype == torch.bfloat16 and torch.equal(theirs["bfloat16"], ours.bfloat16())
