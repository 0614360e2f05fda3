"""Log-probs and entropy against plain torch; that tensor ranks agree is shown in test_layouts."""

import pytest
import torch

from megasync.trainer import logprobs
from megasync.trainer.logprobs import token_logprobs


def plain(logits, targets, vocab_size, temperature):
    log_p = (logits[:, :vocab_size].float() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0)], ids=["both", "logprob", "entropy"])
def test_values_and_gradients_equal_plain_torch(monkeypatch, temperature, weights):
    monkeypatch.setattr(logprobs, "CPU_CHUNK_ELEMENTS", 300)  # several chunks
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(9, 128, generator=generator) * 4).requires_grad_()
    targets = torch.randint(0, 100, (9,), generator=generator)
    slopes = torch.randn(2, 9, generator=generator)

    def gradient(function):
        logprob, entropy = function()
        total = sum(w * (s * x).sum() for w, s, x in zip(weights, slopes, (logprob, entropy), strict=True) if w)
        return torch.autograd.grad(total, logits)[0], logprob, entropy

    mine = gradient(lambda: token_logprobs(logits, targets, vocab_size=100, temperature=temperature))
    expected = gradient(lambda: plain(logits, targets, 100, temperature))
    for a, b in zip(mine, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)


def test_padding_gets_neither_probability_nor_gradient():
    logits = torch.zeros(1, 128)
    logits[:, 100:] = 50.0
    logits.requires_grad_()
    logprob, entropy = token_logprobs(logits, torch.tensor([3]), vocab_size=100)
    torch.testing.assert_close(logprob, -torch.tensor([100.0]).log())
    (logprob + entropy).sum().backward()
    assert logits.grad[:, 100:].abs().max() == 0.0


def test_huge_logits_stay_finite_and_are_not_changed():
    logits = torch.tensor([[1e30, -1e30, 0.0]], requires_grad=True)
    before = logits.detach().clone()
    logprob, entropy = token_logprobs(logits, torch.tensor([0]), vocab_size=3)
    (logprob + entropy).sum().backward()
    assert logprob.item() == 0.0
    assert entropy.item() == 0.0
    assert logits.grad.isfinite().all()
    assert torch.equal(logits.detach(), before)


def test_bfloat16_logits_are_summed_in_float32():
    logits = torch.randn(4, 5000).bfloat16()
    targets = torch.tensor([0, 1, 2, 4999])
    expected = plain(logits.float(), targets, 5000, 1.0)
    torch.testing.assert_close(token_logprobs(logits, targets, vocab_size=5000), expected, atol=1e-5, rtol=1e-5)


def test_no_targets_are_no_error():
    logprob, entropy = token_logprobs(torch.zeros(0, 64), torch.zeros(0, dtype=torch.int64), vocab_size=10)
    assert logprob.shape == entropy.shape == (0,)
