"""How much of a change the merged weights have, after rounding."""

from types import SimpleNamespace

import pytest
import torch

from megasync.trainer.adapters import Adapters

RANK, SCALE = 4, 2.0


def adapters(change: float, dtype: torch.dtype) -> Adapters:
    """Of one weight of about 0.02, which they change by about ``change``."""
    drawn = torch.Generator().manual_seed(1)
    weight = (0.02 * torch.randn(256, 128, generator=drawn)).to(dtype)
    up, down = torch.randn(256, RANK, generator=drawn), torch.randn(RANK, 128, generator=drawn)
    up *= change / (SCALE * RANK**0.5)
    layout = SimpleNamespace(shape=SimpleNamespace(scale=SCALE), sources=lambda item, rank: [0] * 256)
    adapted = SimpleNamespace(item=SimpleNamespace(param="weight"), downs=("down",), up="up")
    return Adapters(layout, 0, {"weight": weight}, {"up": up, "down": down}, [adapted])


def cosine(actual: Adapters) -> float:
    made, served, both = actual.kept.tolist()
    return both / (made * served) ** 0.5


@pytest.mark.parametrize(("change", "low", "high"), [(1e-5, 0.4, 0.6), (1e-4, 0.9, 0.99), (1e-3, 0.999, 1.0)])
def test_small_changes_are_lost_in_bfloat16(change, low, high):
    actual = adapters(change, torch.bfloat16)
    served = actual.served()["weight"].float() - actual.weights["weight"].float()
    made = SCALE * actual.params["up"] @ actual.params["down"]
    expected = torch.cosine_similarity(served.flatten().double(), made.flatten().double(), dim=0).item()
    assert cosine(actual) == pytest.approx(expected, rel=1e-5) and low < expected < high
    # Measured anew with each merge.
    actual.params["up"] *= 1e3
    actual.merge()
    assert cosine(actual) > 0.999


def test_nothing_is_measured_where_nothing_is_rounded_merged_or_changed():
    actual = adapters(1e-5, torch.float32)
    actual.served()
    unchanged = adapters(0.0, torch.bfloat16)
    unchanged.served()
    unmerged = adapters(1e-3, torch.bfloat16)
    unmerged.merge()
    assert not any(each.kept.any() for each in (actual, unchanged, unmerged))
