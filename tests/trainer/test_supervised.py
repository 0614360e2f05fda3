"""Supervised steps compute Hugging Face's loss, before steps and after them, on one rank and on several."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from megasync.supervised.row_file import RowFile, write_rows
from megasync.supervised.rows import TokenRow

pytestmark = pytest.mark.processes

LAYOUTS = {
    1: {"one": {}},
    2: {
        "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
        # Fewer rows than ranks in the last step.
        "dp2": {"data_parallel": 2},
        "pp2": {"pipeline_parallel": 2, "first_stage_layers": 1},
        "cp2": {"context_parallel": 2},
    },
}
NAMES = [name for world in LAYOUTS.values() for name in world]


def rows():
    """Conversations of one and of two trained turns, with tokens between that are not trained."""
    generator = np.random.default_rng(3)
    masks = ["0001111", "00110001111", "011", "0000000000111111", "0101"]
    return [(generator.integers(0, 131, len(mask)).tolist(), [int(x) for x in mask]) for mask in masks]


def hugging_faces_loss(model, chosen):
    """The mean over all trained tokens."""
    losses, count = [], 0
    for ids, mask in chosen:
        labels = torch.tensor([[token if own else -100 for token, own in zip(ids, mask, strict=True)]])
        # Its loss is the mean over a row.
        losses.append(model(torch.tensor([ids]), labels=labels).loss * sum(mask))
        count += sum(mask)
    return sum(losses) / count


@pytest.fixture(scope="module")
def results(run_ranks, models, tmp_path_factory):
    folder, results = tmp_path_factory.mktemp("rows"), {}
    for world, layouts in LAYOUTS.items():
        ranks = run_ranks(supervised, world, model=models["qwen3"], layouts=layouts, rows=rows(), folder=str(folder))
        results |= {name: [rank[name] for rank in ranks] for name in layouts}
    return results


@pytest.fixture(scope="module")
def hugging_face(models):
    """Losses of two steps, on four rows and on the last one, and of all rows before and after."""
    model = AutoModelForCausalLM.from_pretrained(models["qwen3"], dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    steps, whole = [], [hugging_faces_loss(model, rows()).item()]
    for chosen in (rows()[:4], rows()[4:]):
        optimizer.zero_grad()
        loss = hugging_faces_loss(model, chosen)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps.append(loss.item())
    whole.append(hugging_faces_loss(model, rows()).item())
    return steps, whole


@pytest.mark.parametrize("name", NAMES)
def test_losses_before_and_after_steps_are_hugging_faces(results, hugging_face, name):
    steps, whole = hugging_face
    for rank in results[name]:
        assert [step["sft/loss"] for step in rank["steps"]] == pytest.approx(steps, abs=2e-5)
        assert rank["losses"] == pytest.approx(whole, abs=2e-5)
        assert whole[1] < whole[0] - 0.01
        assert rank["steps"][0]["train/tokens"] == sum(sum(mask) for _, mask in rows()[:4])
        assert rank["steps"][0]["train/sequences"] == 4


def supervised(model, layouts, rows, folder):
    """Steps on the first four rows and on the last one; the loss of all rows before and after."""
    from rank_engines import close, make_engine

    from megasync.supervised.step import SupervisedTrainer

    results = {}
    rows = [TokenRow(np.array(ids, np.int32), np.array(trained, np.bool_)) for ids, trained in rows]
    path = Path(folder) / f"rows-{dist.get_rank()}"
    write_rows(path, rows)
    for label, trainer in layouts.items():
        engine = make_engine(model, trainer, {"betas": [0.9, 0.95], "clip_grad": 1.0})
        trainer, file, numbers = SupervisedTrainer(engine), RowFile(path), np.arange(len(rows))
        losses = [trainer.loss(file)]
        steps = [trainer.step(file, numbers[:4], 1), trainer.step(file, numbers[4:], 2)]
        results[label] = {"steps": steps, "losses": [*losses, trainer.loss(file)]}
        close(engine)
    return results
