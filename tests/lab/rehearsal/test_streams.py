"""The code that uses several streams, on a stand-in for them: its races are those that a GPU would have."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from streamed_gpu import Event, NcclWork, StreamedGpu
from tiny_shards import random_weights
from wires import Wires

from megasync.config.schema import OptimizerConfig
from megasync.device import Device
from megasync.sync.shard import receiver
from megasync.trainer import checkpoint, reference
from megasync.trainer.offload import OPTIMIZER, Offload
from megasync.trainer.optimizer import Optimizer, with_offload
from megasync.trainer.reference import ReferenceWeights

WIDTH = 8


@pytest.fixture
def gpu(monkeypatch):
    gpu = StreamedGpu()
    gpu.stand_in(monkeypatch)
    with gpu.here():
        yield gpu


class Chunk(torch.nn.Module):
    """What the reference policy needs to know of a Megatron model, around linear layers."""

    pre_process = post_process = True
    share_embeddings_and_output_weights = False

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output_layer = (torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(2))
        self.decoder = torch.nn.Module()
        self.decoder.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(4))
        self.decoder.final_layernorm = torch.nn.Linear(WIDTH, WIDTH, device="cuda")

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in (self.embedding, *self.decoder.layers, self.decoder.final_layernorm, self.output_layer):
            values = layer(values)
        return values


def score_with_reference() -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the reference after the policy has changed, and what they should be."""
    chunk, values = Chunk(), torch.ones(1, WIDTH, device="cuda")
    with torch.no_grad():
        expected = chunk(values)
        weights = ReferenceWeights([chunk], Device("cuda"))
        for weight in chunk.parameters():
            weight.add_(1)
        with weights.applied():
            for _ in range(3):
                found = chunk(values)
    return found, expected


def test_the_reference_policys_blocks_are_copied_and_read_in_order(gpu):
    found, expected = score_with_reference()
    assert found.tolist() == expected.tolist()
    assert gpu.races == []


def test_a_block_that_is_read_before_its_copy_has_ended_is_found(gpu, monkeypatch):
    monkeypatch.setattr(reference, "wait_event", lambda event, device: None)
    score_with_reference()
    assert any("what copy_ has written" in race for race in gpu.races)
    assert any("copy_ writes what" in race for race in gpu.races)


@pytest.fixture(params=["device", "host"])
def wires(gpu, request):
    """A sync among GPUs; threads of senders and receivers take part in it."""
    wires = Wires(device=Device("cuda"), arena=request.param, place=lambda tensor: gpu.place(tensor, "device"))
    for sender in wires.senders:
        sender.send = partial(in_gpu, gpu, sender.send)
    yield wires
    wires.close()


def in_gpu(gpu, call, *arguments):
    with gpu.here():
        return call(*arguments)


def publish(wires: Wires, attempts: dict[str, str]) -> bool:
    """Stages and commits attempts, each against its base; whether the engine has the weights of the last one.

    From one to the next the first row of every tensor changes. After each commit the engine decodes on another stream,
    and waits for that before the next one.
    """
    whole, decoding = random_weights(wires.layout), torch.cuda.Stream()
    for attempt, base in attempts.items():
        for tensor in whole.values():
            tensor[0] += 1
        wires.weights(whole)
        sent, received = wires.stage(attempt, base)
        assert [report.state for report in received] == ["staged"] * 2, (sent, received)
        wires.commit(attempt)
        with torch.cuda.stream(decoding):
            for tensor in (tensor for rank in wires.engine for tensor in rank.tensors().values()):
                tensor.sum()
        decoding.synchronize()
    return wires.serves(whole)


@pytest.mark.every(3)
@pytest.mark.parametrize("base", ["", "a"], ids=["full", "delta"])
def test_a_sync_packs_sends_digests_and_commits_in_order(gpu, wires, base):
    assert publish(wires, {"a": "", "b": base})
    assert gpu.races == []


def digest_on_another_stream(gpu, monkeypatch):
    digest = receiver.digest

    def elsewhere(message):
        with torch.cuda.stream(other):
            return digest(message)

    other = torch.cuda.Stream()
    monkeypatch.setattr(receiver, "digest", elsewhere)


def no_synchronization(gpu, monkeypatch):
    monkeypatch.setattr(receiver, "synchronize", lambda device: None)


def no_wait_for_messages(gpu, monkeypatch):
    # The data has arrived, but nothing has told the streams so.
    monkeypatch.setattr(NcclWork, "wait", lambda work, limit: work._done.result(10))


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("fault", "base", "race"),
    [
        (digest_on_another_stream, "a", "sum reads what index_copy_ has written"),
        (no_synchronization, "", "sum reads what _foreach_copy_ has written"),
        (no_wait_for_messages, "", "reads what recv has written"),
    ],
)
@pytest.mark.parametrize("wires", ["device"], indirect=True)
def test_a_missing_wait_in_a_sync_is_found(gpu, wires, monkeypatch, fault, base, race):
    fault(gpu, monkeypatch)
    assert publish(wires, {"a": "", "b": base}), "what runs in order here hides the fault"
    assert any(race in found for found in gpu.races), gpu.races


def updated_weights(dtype: torch.dtype, share: float) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """Weights after three updates by Megatron's optimizer with a share of its state on the host, and by Adam alone.

    The third is that optimizer. As in training, the next gradients are computed from the weights, in the memory of the
    former ones.
    """
    options = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.1}
    values = [torch.arange(WIDTH, dtype=torch.float32) / (place + 1) for place in range(4)]
    mains = [torch.nn.Parameter(each.to(dtype).float()) for each in values]
    adam = torch.optim.AdamW(mains, fused=True, **options)
    weights = [each.to("cuda").to(dtype) for each in values]
    gradients = [torch.empty(WIDTH, device="cuda") for _ in values]
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.decoupled_grad = gradient
    hybrid = with_offload(torch.optim.AdamW(weights, **options), OptimizerConfig(offload=share))
    with torch.no_grad():
        for _ in range(3):
            for main, weight, gradient in zip(mains, weights, gradients, strict=True):
                main.grad = main.to(dtype).float().sin()
                gradient.copy_(weight).sin_()
                if hybrid.param_to_inner_param[weight] is weight:
                    weight.grad = gradient
            adam.step()
            hybrid.step()
    return weights, [main.detach().to(dtype) for main in mains], hybrid


@pytest.mark.every(3)
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_megatron_updates_on_the_host_in_order(gpu, dtype, share):
    weights, expected, _ = updated_weights(dtype, share)
    for weight, value in zip(weights, expected, strict=True):
        assert weight.tolist() == value.tolist()
    assert gpu.races == []


def no_wait_for_gradients(gpu, monkeypatch):
    monkeypatch.setattr(Event, "synchronize", lambda event: None)


def no_wait_for_weights(gpu, monkeypatch):
    monkeypatch.setattr(Event, "wait", lambda event, stream=None: None)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("fault", "race"),
    [
        (no_wait_for_gradients, "_fused_adamw_ reads what copy_ has written"),
        (no_wait_for_weights, "copy_ reads what copy_ has written"),
    ],
)
def test_a_missing_wait_of_megatrons_optimizer_is_found(gpu, monkeypatch, fault, race):
    fault(gpu, monkeypatch)
    updated_weights(torch.bfloat16, 0.5)
    assert any(race in found for found in gpu.races), gpu.races


def test_turns_on_the_device_leave_alone_what_is_in_host_memory(gpu):
    *_, hybrid = updated_weights(torch.bfloat16, 0.5)
    optimizer = object.__new__(Optimizer)
    optimizer._optimizer = SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=hybrid)])
    held = optimizer.tensors()
    on_device = [tensor for tensor in held if tensor.is_cuda]
    on_host = [tensor for tensor in held if not tensor.is_cuda]
    values = [tensor.tolist() for tensor in on_host]
    # Of each of two weights in either place a main weight, two moments and a count; on the host a gradient too.
    assert (len({id(tensor) for tensor in on_device}), len({id(tensor) for tensor in on_host})) == (8, 10)
    Offload(lambda: {OPTIMIZER: held}, Device("cuda")).offload(OPTIMIZER)
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in on_device)
    assert [tensor.tolist() for tensor in on_host] == values


def copied_twice(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    # The stand-in follows every byte.
    monkeypatch.setattr(checkpoint.HostMemory, "BLOCK", 256)
    weight, memory = torch.ones(WIDTH, device="cuda"), checkpoint.HostMemory()
    shard = checkpoint.Shard(SimpleNamespace(writers=lambda rank: {"w": 0}), "float32", 0, {"w": weight}, {}, False, 0)  # pyright: ignore[reportArgumentType]
    written = []
    for _ in range(2):
        weight.mul_(2)
        memory.clear()
        copied = checkpoint.copied(shard, memory, weight.device)
        weight.add_(1)
        written.append(copied.params["w"].clone())
    return written


def test_a_checkpoint_is_written_from_complete_copies(gpu, monkeypatch):
    assert [copy.tolist() for copy in copied_twice(monkeypatch)] == [[2.0] * WIDTH, [6.0] * WIDTH]
    assert gpu.races == []


def test_a_checkpoint_that_does_not_wait_for_its_copies_is_found(gpu, monkeypatch):
    monkeypatch.setattr(checkpoint, "synchronize", lambda device: None)
    copied_twice(monkeypatch)
    assert "clone reads what copy_ has written, without waiting for it" in str(gpu.races)
