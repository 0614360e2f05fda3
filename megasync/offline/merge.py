"""Merges adapters of a checkpoint into the weights of their model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megasync.errors import CheckpointError
from megasync.layout.adapter import UNEMBED, AdapterLayout
from megasync.layout.adapter_files import low_rank_product
from megasync.layout.layout import Layout, Piece
from megasync.layout.shards import (
    HfFolder,
    Read,
    ReadParam,
    ReadPart,
    ShardFiles,
    export_checkpoint,
    fill_param,
    pieces_by_param,
    read_layout,
    reading_parts,
    write_folder,
)
from megasync.layout.topology import Topology


def export_model(checkpoint_dir: str | Path, source: str | Path, out: str | Path) -> None:
    """Writes a checkpoint as a Hugging Face folder of a whole model: adapters are merged into the one in ``source``.

    Raises CheckpointError as `shards.export_checkpoint` does.
    """
    layout, dtype = read_layout(checkpoint_dir)
    if not isinstance(layout, AdapterLayout):
        export_checkpoint(checkpoint_dir, source, out)
        return
    with ShardFiles(checkpoint_dir) as files, HfFolder(source) as folder:
        merged, read = merging(folder, layout, files.part)
        write_folder(Path(source), Path(out), merged, dtype, read)


def merging(folder: HfFolder, layout: AdapterLayout, part: ReadPart) -> tuple[Layout, ReadParam]:
    """A layout of one rank for the model in ``folder``, and a function that reads its merged parameters, float32.

    ``part`` reads boxes of the adapters of ``layout``.
    """
    one = AdapterLayout(Layout(layout.hf_config, Topology()), layout.shape)
    if one.base.tied and UNEMBED in layout.shape.targets:
        raise CheckpointError(
            f"adapters of {UNEMBED} cannot be merged into a model whose output layer is its embedding; export them as "
            f"a PEFT folder"
        )
    adapted = {each.item.param: each for each in one.adapted(0)}
    weights = folder.reading(one.base.hf_tensors), pieces_by_param(one.base, 0), one.base.params(0)
    factors = reading_parts(layout, part), pieces_by_param(one, 0), one.params(0)

    def read(rank: int, param: str) -> torch.Tensor:
        weight = _whole(param, *weights)
        if each := adapted.get(param):
            sources = torch.tensor(one.sources(each.item, rank))
            downs = [_whole(down, *factors) for down in each.downs]
            weight.add_(low_rank_product(downs, _whole(each.up, *factors), sources), alpha=layout.shape.scale)
        return weight

    return one.base, read


def _whole(
    param: str, read: Read, pieces: Mapping[str, list[Piece]], shapes: Mapping[str, tuple[int, ...]]
) -> torch.Tensor:
    return fill_param(shapes[param], pieces[param], read, torch.float32)
