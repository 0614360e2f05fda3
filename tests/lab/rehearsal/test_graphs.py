"""The stand-in for CUDA graphs: what it repeats, what it does not see, and what it refuses."""

import pytest
import torch

from megasync.lab.rehearsal.graphs import StandInGraph, capture, kernel


def captured(function):
    graph = StandInGraph()
    with capture(graph):
        result = function()
    return graph, result


def test_calls_are_repeated_on_the_same_memory():
    given, total = torch.ones(3), torch.zeros(3)

    def work():
        total.add_(given)
        return (given * 2).view(3, 1)

    graph, result = captured(work)
    assert result.isnan().all(), "a GPU computes nothing during a capture"
    total.zero_()
    given.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(2):
        graph.replay()
    assert result.flatten().tolist() == [2.0, 4.0, 6.0]
    assert total.tolist() == [2.0, 4.0, 6.0]


def test_other_memory_and_other_numbers_are_not_seen():
    weight, factor = torch.nn.Parameter(torch.ones(2)), 3.0
    graph, result = captured(lambda: weight.detach() * factor)
    weight.data, factor = torch.full((2,), 5.0), 7.0
    graph.replay()
    assert result.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("read", ["item", "tolist", "numpy", "__bool__", "nonzero"])
def test_python_may_not_read_values(read):
    value = torch.ones(())
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        captured(lambda: getattr(value, read)())
    assert value.tolist() == value.item() == 1.0


def test_a_kernel_may_read_values_and_is_one_call():
    lengths = torch.tensor([1, 2])
    total = kernel(lambda: torch.tensor([float(sum(lengths.tolist()))]))
    graph, result = captured(total)
    assert len(graph.calls) == 1
    lengths.copy_(torch.tensor([3, 4]))
    graph.replay()
    assert result.tolist() == [7.0]


def test_gradients_are_computed_by_a_graph():
    weight = torch.tensor([2.0], requires_grad=True)
    factor = torch.tensor([3.0])
    graph, (gradient,) = captured(lambda: torch.autograd.grad((weight * factor).sum(), [weight]))
    factor.fill_(5.0)
    graph.replay()
    assert gradient.tolist() == [5.0]
