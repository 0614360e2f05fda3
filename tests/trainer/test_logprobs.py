"""Log-probs and entropies against plain torch; that tensor ranks agree is shown in test_layouts."""

import pytest
import torch

from megasync.planning import memory
from megasync.trainer import logprobs
from megasync.trainer.logprobs import TargetSupport, squared_norms, token_logprobs
from megasync.trajectory import Support


def plain(rows, weight, targets, vocab_size, temperature, outside=None):
    logits = (rows @ weight.T)[:, :vocab_size].float() / temperature
    if outside is not None:
        logits = logits.masked_fill(outside, -1e9)
    log_p = logits.log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def identity(logits):
    """An output layer by which hidden states are the logits."""
    return torch.eye(logits.shape[1], dtype=logits.dtype)


@pytest.mark.parametrize("part", [10**6, 400], ids=["one part", "several parts"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, torch.linspace(0.5, 1.5, 9)], ids=["1", "0.6", "of each target"])
@pytest.mark.parametrize("slopes", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)], ids=["both", "logprob", "entropy"])
@pytest.mark.parametrize("truncated", [False, True])
def test_values_and_gradients_equal_plain_torch(monkeypatch, part, temperature, slopes, truncated):
    """Of truncated targets, 0 and 5 could be anything, and target 1 nothing else."""
    monkeypatch.setattr(logprobs, "CPU_CHUNK_ELEMENTS", 300)  # several chunks
    monkeypatch.setattr(logprobs, "PART_ELEMENTS", part)
    generator = torch.Generator().manual_seed(1)
    rows, weight = (torch.randn(count, 16, generator=generator).requires_grad_() for count in (9, 128))
    targets = torch.randint(0, 100, (9,), generator=generator)
    factors = torch.randn(2, 9, generator=generator)
    support = outside = None
    if truncated:
        others = [torch.randperm(100, generator=generator)[:size].tolist() for size in (0, 0, 3, 40, 99, 0, 2, 1, 7)]
        ids = [sorted({*each, target}) for each, target in zip(others, targets.tolist(), strict=True)]
        ids[0] = ids[5] = []
        outside = torch.tensor([[bool(each) and i not in each for i in range(100)] for each in ids])
        support = TargetSupport.of(Support.of(ids), torch.device("cpu"))

    def gradients(logprob, entropy):
        total = sum(w * (f * x).sum() for w, f, x in zip(slopes, factors, (logprob, entropy), strict=True) if w)
        return *torch.autograd.grad(total, (rows, weight)), logprob, entropy

    mine = gradients(*token_logprobs(rows, weight, targets, vocab_size=100, temperature=temperature, support=support))
    divisor = temperature if isinstance(temperature, float) else temperature[:, None]
    for a, b in zip(mine, gradients(*plain(rows, weight, targets, 100, divisor, outside)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert not truncated or mine[2][1] == mine[3][1] == 0.0


@pytest.mark.parametrize("part", [10**6, 400], ids=["one part", "several parts"])
def test_an_adapter_changes_logits_as_the_weight_that_it_stands_for(monkeypatch, part):
    monkeypatch.setattr(logprobs, "PART_ELEMENTS", part)
    generator = torch.Generator().manual_seed(1)
    shapes = (9, 16), (128, 16), (4, 16), (128, 4)
    rows, weight, down, up = (torch.randn(shape, generator=generator) for shape in shapes)
    trained = [tensor.requires_grad_() for tensor in (rows, down, up)]
    targets, factors = torch.randint(0, 100, (9,), generator=generator), torch.randn(9, generator=generator)

    def gradients(logprob):
        return *torch.autograd.grad((factors * logprob).sum(), trained), logprob

    found, _ = token_logprobs(rows, weight, targets, vocab_size=100, adapter=(2 * rows @ down.T, up))
    expected, _ = plain(rows, weight + 2 * up @ down, targets, 100, 1.0)
    for one, other in zip(gradients(found), gradients(expected), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_squared_norms_are_those_of_the_gradients_by_the_logits(temperature):
    logits = (3 * torch.randn(7, 20, generator=torch.Generator().manual_seed(3))).requires_grad_()
    targets = torch.arange(7)
    (logits / temperature).log_softmax(-1).gather(1, targets[:, None]).sum().backward()
    expected = (logits.grad * temperature).square().sum(dim=1)
    rows = logits.detach()
    warm, cold = (
        token_logprobs(rows, identity(rows), targets, vocab_size=20, temperature=by)[0]
        for by in (temperature, temperature / 2)
    )
    torch.testing.assert_close(squared_norms(warm, cold), expected, atol=1e-5, rtol=1e-5)


def test_no_more_than_a_part_of_the_logits_exists_at_a_time(monkeypatch):
    monkeypatch.setattr(logprobs, "PART_ELEMENTS", 400)
    rows, weight = torch.randn(50, 16, requires_grad=True), torch.randn(100, 16, requires_grad=True)
    sizes = []
    project = logprobs.linear
    monkeypatch.setattr(logprobs, "linear", lambda *arguments: sizes.append(project(*arguments)) or sizes[-1])
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        logprob, _ = token_logprobs(rows, weight, torch.zeros(50, dtype=torch.int64), vocab_size=100)
    logprob.sum().backward()
    assert [logits.numel() for logits in sizes] == ([400] * 12 + [200]) * 2  # forward, and again backward
    assert max(tensor.numel() for tensor in saved) == weight.numel()


def test_parts_of_a_bfloat16_weights_gradient_are_summed_in_float32(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    rows, weight = (torch.randn(count, 16, generator=generator).bfloat16() for count in (512, 64))
    targets = torch.randint(0, 64, (512,), generator=generator)

    def gradient(part):
        monkeypatch.setattr(logprobs, "PART_ELEMENTS", part)
        head = weight.clone().requires_grad_()
        token_logprobs(rows, head, targets, vocab_size=64)[0].sum().backward()
        return head.grad.float()

    exact = weight.float().requires_grad_()
    token_logprobs(rows.float(), exact, targets, vocab_size=64)[0].sum().backward()
    whole, parts = ((gradient(part) - exact.grad).norm() for part in (10**6, 128))
    assert parts <= 1.5 * whole


def test_a_float32_head_computes_in_float32_from_bfloat16_weights():
    rows, weight = torch.randn(5, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    targets = torch.arange(5)
    actual = token_logprobs(rows, weight, targets, vocab_size=30, dtype=torch.float32)
    torch.testing.assert_close(actual, plain(rows.float(), weight.float(), targets, 30, 1.0))


def test_a_frozen_weight_gets_no_gradient():
    rows, weight = torch.randn(3, 8, requires_grad=True), torch.randn(16, 8)
    token_logprobs(rows, weight, torch.arange(3), vocab_size=16)[0].sum().backward()
    assert rows.grad is not None
    assert weight.grad is None


def test_huge_logits_stay_finite_and_are_not_changed():
    logits = torch.tensor([[1e30, -1e30, 0.0]], requires_grad=True)
    before = logits.detach().clone()
    logprob, entropy = token_logprobs(logits, identity(logits), torch.tensor([0]), vocab_size=3)
    (logprob + entropy).sum().backward()
    assert logprob.item() == 0.0
    assert entropy.item() == 0.0
    assert logits.grad.isfinite().all()
    assert torch.equal(logits.detach(), before)


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.randn(4, 5000).bfloat16()
    targets = torch.tensor([0, 1, 2, 4999])
    expected = plain(logits.float(), identity(logits).float(), targets, 5000, 1.0)
    actual = token_logprobs(logits, identity(logits), targets, vocab_size=5000)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_no_targets_are_no_error():
    rows, weight = torch.zeros(0, 4, requires_grad=True), torch.ones(64, 4, requires_grad=True)
    logprob, entropy = token_logprobs(rows, weight, torch.zeros(0, dtype=torch.int64), vocab_size=10)
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert not weight.grad.any()


def test_the_plan_of_memory_knows_the_sizes_of_parts():
    assert (memory.LOGITS_PART, memory.LOGITS_CHUNK) == (logprobs.PART_ELEMENTS, logprobs.CHUNK_ELEMENTS)
