"""Safetensors files with true headers and sparse data: whole model folders in no time and no space."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from megasync.layout.layout import Layout
from megasync.layout.model_files import read_hf_config
from megasync.layout.topology import Topology


def write_header(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """A file of float32 tensors, all zero."""
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end := end + 4 * prod(shape)]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_headers(folder: Path, files: int = 1) -> None:
    """The weights that the folder's config.json describes, in one file or in several with an index."""
    layout = Layout(read_hf_config(folder), Topology())
    shapes = {**layout.hf_tensors, **layout.frozen_tensors}
    if files == 1:
        write_header(folder / "model.safetensors", shapes)
        return
    names = [*shapes]
    where: dict[str, str] = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = names[number::files]
        write_header(folder / file, {name: shapes[name] for name in part})
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
