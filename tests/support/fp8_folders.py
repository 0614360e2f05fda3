"""Folders in block FP8, and the same weights dequantized block by block in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# As the published folders, which keep these unquantized.
PLAIN = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "bias", "shared_expert_gate", "conv1d", "A_log")


def quantize(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales, block by block: the largest element becomes 448, the largest of float8_e4m3fn."""
    rows, cols = (-(-size // step) for size, step in zip(weight.shape, block, strict=True))
    values, scales = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty(rows, cols)
    for place, scale in block_views(values, scales, block):
        part = weight[place].float()
        scale.fill_(part.abs().max().clamp(min=1e-4) / 448)
        values[place] = (part * (1 / scale)).to(torch.float8_e4m3fn)
    return values, scales


def block_views(values, scales, block):
    """For each block, its place in the values, and the view of its scale."""
    for row in range(scales.shape[0]):
        for col in range(scales.shape[1]):
            place = tuple(slice(at * step, (at + 1) * step) for at, step in zip((row, col), block, strict=True))
            yield place, scales[row, col]


def write_fp8(
    source: Path, fp8: Path, plain: Path, block: tuple[int, int] = (128, 128), scales_dtype=torch.float32
) -> tuple[Path, Path]:
    """Quantizes a folder into ``fp8``, with the scales in a file of their own, and dequantizes that into ``plain``."""
    tensors, scales, whole = {}, {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if any(part in name for part in PLAIN):
            tensors[name] = whole[name] = weight
            continue
        tensors[name], exact = quantize(weight, block)
        scales[name + "_scale_inv"] = of_blocks = exact.to(scales_dtype)
        whole[name] = torch.empty(weight.shape)
        for place, scale in block_views(tensors[name], of_blocks, block):
            whole[name][place] = tensors[name][place].float() * scale.float()
    config = json.loads((source / "config.json").read_text())
    method = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": list(block)}
    for folder, values in ((fp8, config | {"quantization_config": method}), (plain, config)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(values))
        for pattern in ("tokenizer*", "special_tokens*"):
            for path in source.glob(pattern):
                (folder / path.name).write_bytes(path.read_bytes())
    files = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": scales}
    for file, held in files.items():
        save_file(held, fp8 / file, metadata={"format": "pt"})
    where = {name: file for file, held in files.items() for name in held}
    (fp8 / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    save_file(whole, plain / "model.safetensors", metadata={"format": "pt"})
    return fp8, plain
