"""Loading optimizer state takes no more memory than a training step."""

import weakref
from types import SimpleNamespace

import torch

from megasync.trainer.optimizer import Optimizer


def stepped(seed):
    """An optimizer of one float32 weight that took a step; free of Megatron."""
    torch.manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(64))
    weight.grad = torch.randn(64)
    inner = torch.optim.AdamW([weight], lr=0.1)
    inner.step()
    optimizer = object.__new__(Optimizer)
    optimizer._keeps_main_weights, optimizer._precision_aware, optimizer.updates = False, False, 1
    optimizer._optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)])
    return optimizer, inner, weight


def test_old_moments_are_freed_before_new_ones_are_loaded(monkeypatch):
    first, _, other = stepped(0)
    saved = first.slices({"w": other})
    optimizer, inner, weight = stepped(1)
    held = [weakref.ref(value) for value in inner.state[weight].values()]
    alive = []
    load = torch.optim.AdamW.load_state_dict

    def watched(self, state):
        alive.append(sum(tensor() is not None for tensor in held))
        load(self, state)

    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", watched)
    optimizer.restore({"w": weight}, saved, 1)
    assert held and alive == [0]
    for name, value in saved["w"].tensors.items():
        assert torch.equal(inner.state[weight][name], value), name
