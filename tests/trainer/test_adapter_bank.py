"""Several models of adapters on the same ranks: each computes what PyTorch does with its adapters alone.

`script` runs a list of calls of a bank on ranks. `Reference` is Hugging Face's model with the same factors, autograd
and AdamW. Everything is float32, and agrees to 1e-5.
"""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.func import functional_call

RANK, ALPHA = 6, 32.0
# Epsilon is large: Adam would make whole steps of rounding errors where a gradient is small.
ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1.0, "weight_decay": 0.1, "clip_grad": 0.0}
ALL = {"attention": True, "mlp": True, "unembed": True}


def shape_of(path, rank, **flags):
    from megasync.layout.adapter import kinds_of_projections
    from megasync.layout.layout import Layout
    from megasync.layout.model_files import read_hf_config
    from megasync.layout.topology import Topology

    kinds = kinds_of_projections(Layout(read_hf_config(path), Topology()))
    chosen = {**ALL, **flags}
    return {"rank": rank, "scale": ALPHA / rank, "targets": sorted(t for k in kinds if chosen[k] for t in kinds[k])}


def script(model, trainer, calls, dtype="float32", least=None):
    """Runs calls of a bank on a rank; returns their results. A call is [method, arguments...].

    ``least``: the tokens with which passes are computed together, in place of the bank's own.
    """
    from rank_engines import close, make_engine

    from megasync.errors import CheckpointError
    from megasync.layout.adapter import AdapterShape
    from megasync.service.interfaces import Datum, Pass, ServedModel
    from megasync.service.ranks import checked
    from megasync.tenants.adapter_bank import AdapterBank
    from megasync.trainer.adam import Adam

    def shape(given):
        return AdapterShape(given["rank"], given["scale"], tuple(given["targets"]))

    def work(given):
        data = [
            Datum(np.array(each["tokens"]), {name: np.array(column) for name, column in each["inputs"].items()})
            for each in given["data"]
        ]
        served = ServedModel("", 1000, engine.layout.sizes.vocab, RANK)
        return checked(Pass(given["loss"], given.get("config", {}), data, given.get("backward", True)), served)

    def tensors_of(model):
        slices = [tensor for each in model.slices.values() for tensor in each.tensors.values()]
        return [*model.params.values(), *slices, *model.gradients]

    lora = {"rank": RANK, "alpha": ALPHA, "targets": shape_of(model, RANK)["targets"]}
    engine = make_engine(model, {**trainer, "lora": lora}, dtype=dtype)
    bank = AdapterBank(engine)
    together = mock.Mock(side_effect=bank._compute_together)
    bank._compute_together = together
    bank._least = least or bank._least
    results = []
    for name, *arguments in calls:
        if name == "create":
            results.append(bank.create(arguments[0], shape(arguments[1]), arguments[2]))
        elif name == "compute":
            results.append(bank.compute([(which, work(given)) for which, given in arguments]))
        elif name == "update":
            update = bank.update(arguments[0], Adam(**{**ADAM, **arguments[1]}))
            results.append((update.applied, update.grad_norm))
        elif name == "save":
            saved = bank.copied(arguments[0], arguments[2])
            results.append(saved and saved.write(Path(arguments[1])))
            dist.barrier()
        elif name == "load":
            try:
                results.append(bank.load(arguments[0], shape(arguments[1]), Path(arguments[2]), arguments[3]))
            except CheckpointError as error:
                results.append(str(error))
        elif name == "unload":
            results.append(bank.unload(arguments[0]))
        elif name == "state":
            state = bank._state(arguments[0])
            moments = [tensor for each in state.slices.values() for tensor in each.tensors.values()]
            results.append(([param.clone() for param in state.params.values()], moments))
        elif name == "microbatches":
            # Of several models, so far.
            results.append(together.call_count)
        elif name == "memory":
            # The bytes of all that the bank keeps.
            kept = [tensor for each in bank._models.values() for tensor in tensors_of(each)]
            results.append(sum(tensor.nbytes for tensor in kept))
    close(engine)
    return results


class Reference:
    """Adapters of a PEFT folder beside Hugging Face's frozen model."""

    def __init__(self, path, folder, adam=None):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        config = json.loads((Path(folder) / "adapter_config.json").read_text())
        self.scale = config["lora_alpha"] / config["r"]
        self.factors = {
            name: factor.requires_grad_()
            for name, factor in load_file(Path(folder) / "adapter_model.safetensors").items()
        }
        options = {**ADAM, **(adam or {})}
        self.adam = torch.optim.AdamW(
            self.factors.values(),
            lr=options["learning_rate"],
            betas=(options["beta1"], options["beta2"]),
            eps=options["eps"],
            weight_decay=options["weight_decay"],
        )

    def compute(self, given, loss=None):
        """(log-probs of each datum, loss), and adds gradients."""
        weights = {name: param.detach() for name, param in self.model.model.named_parameters()}
        head = self.model.lm_head.weight.detach()
        for name, down in self.factors.items():
            if not name.endswith(".lora_A.weight"):
                continue
            change = self.scale * self.factors[name.replace("lora_A", "lora_B")] @ down
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if layer == "lm_head":
                head = head + change
            else:
                weights[layer.removeprefix("model.") + ".weight"] = (
                    weights[layer.removeprefix("model.") + ".weight"] + change
                )
        logprobs, total = [], 0.0
        for datum in given["data"]:
            ids = torch.tensor(datum["tokens"])[None]
            hidden = functional_call(self.model.model, weights, args=(ids,)).last_hidden_state[0]
            targets = torch.tensor(datum["inputs"]["target_tokens"])
            log_p = (hidden @ head.T).log_softmax(-1)
            chosen = log_p.gather(1, targets.view(len(targets), -1)).view(targets.shape)
            logprobs.append(chosen.detach())
            inputs = {name: torch.tensor(column) for name, column in datum["inputs"].items()}
            total = total + (loss or LOSSES[given["loss"]])(chosen, inputs)
        if given.get("backward", True):
            total.backward()
        return logprobs, total.item()

    def update(self):
        self.adam.step()
        self.adam.zero_grad()


def clipped(ratio, a, low=0.8, high=1.2):
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


def gspo(lp, inputs):
    mask = inputs["sequence_ratio_mask"] != 0
    of_sequence = (lp.detach() - inputs["logprobs"])[mask].mean()
    return clipped((of_sequence + lp - lp.detach()).exp(), inputs["advantages"])


# The definitions of the protocol, of one sequence.
LOSSES = {
    "cross_entropy": lambda lp, i: -(lp * i["weights"]).sum(),
    "importance_sampling": lambda lp, i: -((lp - i["logprobs"]).exp() * i["advantages"]).sum(),
    "ppo": lambda lp, i: clipped((lp - i["logprobs"]).exp(), i["advantages"]),
    "cispo": lambda lp, i: -((lp - i["logprobs"]).exp().clamp(0, 4).detach() * lp * i["advantages"]).sum(),
    "dro": lambda lp, i: -(lp * i["advantages"] - 0.025 * (lp - i["logprobs"]) ** 2).sum(),
    "gspo": gspo,
}


def data_for(loss, seed=3, width=0, counts=(7, 1, 30)):
    """A pass over random sequences, some of which begin alike; few targets are the next token."""
    drawn = torch.Generator().manual_seed(seed)
    prompt, data = torch.randint(0, 131, (13,), generator=drawn).tolist(), []
    rows = [torch.randint(0, 131, (count,), generator=drawn).tolist() for count in counts]
    # With a common prompt: one more, one without anything after it, and two that are the same.
    rows += [prompt + rows[0], prompt, prompt + rows[1], prompt + rows[1]]
    predicted = torch.randint(0, 131, (40, max(width, 1)), generator=drawn)
    for tokens in rows:
        count = len(tokens)
        shape = (count, width) if width else (count,)
        # Some of the targets of common prompts are the same.
        targets = torch.where(torch.rand(predicted.shape, generator=drawn) < 0.3, 7, predicted)[:count].view(shape)
        inputs, noise = {"target_tokens": targets.tolist()}, torch.randn(shape, generator=drawn)
        if loss == "cross_entropy":
            inputs["weights"] = (noise * (noise > -0.3)).tolist()
        else:
            # Around the log-probs of an almost uniform distribution, so that bounds matter on both sides.
            inputs["logprobs"] = (-5 + 0.7 * noise).tolist()
            inputs["advantages"] = torch.randn(shape, generator=drawn).tolist()
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = [float(place % 3 != 1) for place in range(count)]
        data.append({"tokens": tokens, "inputs": inputs})
    return {"loss": loss, "data": data}


def outputs(parts, given):
    """(log-probs of each datum, loss) from what ranks returned."""
    found = {i: v for part in parts for i, v in zip(part.sequences, part.logprobs, strict=True)}
    shapes = [torch.tensor(datum["inputs"]["target_tokens"]).shape for datum in given["data"]]
    logprobs = [torch.tensor(found[index]).view(shape) for index, shape in enumerate(shapes)]
    return logprobs, sum(part.sums.get("loss", 0.0) for part in parts)


def assert_same(found, expected):
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    # A sum over all targets, whose terms cancel: each one may be off by as much as its log-prob.
    targets = sum(one.numel() for one in expected[0])
    assert found[1] == pytest.approx(expected[1], rel=0, abs=1e-5 * targets)


def assert_same_factors(folder, reference):
    for name, factor in load_file(folder / "adapter_model.safetensors").items():
        torch.testing.assert_close(factor, reference.factors[name].detach(), atol=1e-5, rtol=0, msg=name)


LAYOUTS = {
    "one": {},
    "tp2": {"tensor_parallel": 2},
    "tp2-sp": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2, "first_stage_layers": 1, "tokens_per_microbatch": 32},
    "pp2-vpp2": {"pipeline_parallel": 2, "virtual_pipeline": 2, "tokens_per_microbatch": 64},
    "dp2": {"data_parallel": 2, "tokens_per_microbatch": 32},
    "cp2": {"context_parallel": 2},
}
# (family, layout, flavour); qwen2's output layer is tied.
CASES = [
    *(("qwen2", layout, "local") for layout in LAYOUTS if layout != "pp2-vpp2"),
    *(("mistral", layout, "local") for layout in ("one", "tp2", "dp2", "pp2-vpp2")),
    ("mistral", "tp2-sp", "te"),
]
# The passes before each optimizer step.
STEPS = [
    [data_for("cross_entropy", 1), data_for("cross_entropy", 2, width=3)],
    [data_for("importance_sampling")],
    [data_for("ppo"), {**data_for("gspo"), "backward": False}, data_for("cispo")],
    [data_for("dro"), data_for("gspo")],
]


@pytest.mark.parametrize(("family", "layout", "flavour"), CASES)
def test_steps_with_all_losses_are_those_of_autograd(run_ranks, models, family, layout, flavour, tmp_path):
    """Of a model of a smaller rank; its second step is the first in which all factors have gradients."""
    path = models[family]
    calls = [["create", "a", shape_of(path, 4), 11], ["save", "a", str(tmp_path / "fresh"), False]]
    for passes in STEPS:
        calls += [["compute", *(["a", given] for given in passes)], ["update", "a", {}]]
    calls.append(["save", "a", str(tmp_path / "after"), True])
    world = 1 if layout == "one" else 2
    ranks = run_ranks(script, world, flavour, model=path, trainer=LAYOUTS[layout], calls=calls)
    reference = Reference(path, tmp_path / "fresh")
    for step, passes in enumerate(STEPS):
        for place, given in enumerate(passes):
            parts = [rank[2 + 2 * step][place] for rank in ranks]
            assert_same(outputs(parts, given), reference.compute(given))
        norm = torch.stack([factor.grad.norm() for factor in reference.factors.values()]).norm().item()
        assert all(rank[3 + 2 * step] == (True, pytest.approx(norm, rel=1e-4)) for rank in ranks)
        reference.update()
    assert_same_factors(tmp_path / "after", reference)


def test_a_clipped_step_is_that_of_autograd(run_ranks, models, tmp_path):
    path, given = models["qwen2"], data_for("cross_entropy")
    adam = {"learning_rate": 0.3, "beta1": 0.5, "beta2": 0.7, "eps": 0.1, "weight_decay": 0.0, "clip_grad": 0.25}
    calls = [["create", "a", shape_of(path, 4), 1], ["save", "a", str(tmp_path / "fresh"), False]]
    calls += [["compute", ["a", given]], ["update", "a", adam], ["save", "a", str(tmp_path / "after"), False]]
    run_ranks(script, 1, model=path, trainer={}, calls=calls)
    reference = Reference(path, tmp_path / "fresh", adam)
    reference.compute(given)
    torch.nn.utils.clip_grad_norm_(reference.factors.values(), 0.25)
    reference.update()
    assert_same_factors(tmp_path / "after", reference)


def own_calls(path, folder):
    """A model's calls and, between them, places for those of others."""
    one, other = data_for("cross_entropy"), data_for("importance_sampling", 5)
    yield [["create", "a", shape_of(path, 5), 3]]
    yield [["compute", ["a", one]]]
    yield [["compute", ["a", other]]]
    yield [["update", "a", {}]]
    yield [["compute", ["a", {**one, "backward": False}]]]
    yield [["compute", ["a", other]], ["update", "a", {}], ["save", "a", str(folder), True]]


TWO = {"one": {}, "tp2": LAYOUTS["tp2"], "dp2": LAYOUTS["dp2"]}


@pytest.mark.parametrize(("layout", "dtype"), [(layout, "float32") for layout in TWO] + [("dp2", "bfloat16")])
def test_interleaved_models_compute_what_each_does_alone(run_ranks, models, layout, dtype, tmp_path):
    """Bit for bit, also beside one whose gradient overflows."""
    path, world = models["qwen2"], 1 if layout == "one" else 2
    options = {"model": path, "trainer": TWO[layout], "dtype": dtype}
    alone = [call for calls in own_calls(path, tmp_path / "alone") for call in calls]
    expected = run_ranks(script, world, **options, calls=alone)

    huge = data_for("cross_entropy")
    for datum in huge["data"]:
        datum["inputs"]["weights"] = [3e38] * len(datum["tokens"])
    others = iter(
        [
            [["create", "b", shape_of(path, 2, mlp=False, unembed=False), 4]],
            [["compute", ["b", data_for("ppo")], ["gone", data_for("ppo")]]],
            [["update", "b", {}], ["save", "b", str(tmp_path / "b"), True]],
            [["compute", ["b", huge], ["b", data_for("cross_entropy")]], ["update", "b", {}]],
            [["create", "c", shape_of(path, 6), 4], ["compute", ["c", data_for("cispo")]], ["update", "c", {}]],
            [["save", "b", str(tmp_path / "b-later"), True], ["unload", "c"]],
        ]
    )
    calls, mine = [], []
    for own in own_calls(path, tmp_path / "together"):
        for call in own:
            mine.append(len(calls))
            calls.append(call)
        calls += next(others)
    ranks = run_ranks(script, world, **options, calls=calls)
    for rank, one in zip(ranks, expected, strict=True):
        assert_equal([rank[place] for place in mine], one)
    assert all(
        (tmp_path / "together" / name).read_bytes() == file.read_bytes() for name, file in files(tmp_path / "alone")
    )
    # A pass for a model that is not there fails alone, and a step of non-finite gradients is not taken.
    (refused,) = [place for place, call in enumerate(calls) if call[0] == "compute" and call[-1][0] == "gone"]
    (skipped,) = [place + 1 for place, call in enumerate(calls) if ["b", huge] in call]
    for rank in ranks:
        assert "there is no model 'gone'" in str(rank[refused][1]) and not rank[skipped][0]
    assert all((tmp_path / "b-later" / name).read_bytes() == file.read_bytes() for name, file in files(tmp_path / "b"))


JOINT = {**TWO, "dp2": {"data_parallel": 2}, "pp2": {"pipeline_parallel": 2, "first_stage_layers": 1}}
# The ranks of the models, the projections that they lack, and the losses of their passes, one after another.
MEMBERS = {
    "a": (5, {}, ("cross_entropy", "importance_sampling", "ppo")),
    "b": (2, {"mlp": False, "unembed": False}, ("ppo", "cispo", "cross_entropy")),
    "c": (6, {"attention": False}, ("dro", "cross_entropy", "cross_entropy")),
}


@pytest.mark.parametrize(
    ("family", "layout", "dtype"),
    [("qwen2", layout, "float32") for layout in JOINT] + [("qwen2", "one", "bfloat16"), ("mistral", "dp2", "float32")],
)
def test_models_in_one_microbatch_compute_what_each_does_alone(run_ranks, models, family, layout, dtype, tmp_path):
    """Bit for bit, also beside one whose loss and gradient overflow, and one whose passes need several microbatches."""
    path, world = models[family], 1 if layout == "one" else 2
    options = {"model": path, "trainer": {"tokens_per_microbatch": 700, **JOINT[layout]}, "dtype": dtype}
    numbers = {name: number for number, name in enumerate(MEMBERS)}

    def create(name):
        rank, lacks, _ = MEMBERS[name]
        return ["create", name, shape_of(path, rank, **lacks), 3 + numbers[name]]

    def work(name, place):
        # Of other lengths, with which attention rounds otherwise.
        counts = 7 + 3 * numbers[name], 1, 30 - 4 * numbers[name]
        return [name, data_for(MEMBERS[name][2][place], 5 * numbers[name] + place, counts=counts)]

    def forward(name):
        return [name, {**work(name, 0)[1], "backward": False}]

    expected = {}
    for name in MEMBERS:
        calls = [create(name), ["compute", work(name, 0)], ["compute", work(name, 1)], ["update", name, {}]]
        calls += [["compute", forward(name)], ["compute", work(name, 2)], ["update", name, {}]]
        calls += [["save", name, str(tmp_path / f"{name}-alone"), True]]
        expected[name] = [rank[1:-1] for rank in run_ranks(script, world, **options, calls=calls)]

    huge, large = data_for("cross_entropy", 7), data_for("cross_entropy", 8)
    for datum in huge["data"]:
        datum["inputs"]["weights"] = [3e38] * len(datum["tokens"])
    large["data"] = 12 * large["data"]
    update = [["update", name, {}] for name in MEMBERS]
    calls = [
        *map(create, MEMBERS),
        ["create", "huge", shape_of(path, 6), 9],
        ["create", "large", shape_of(path, 6), 9],
        ["compute", work("a", 0), work("b", 0), ["gone", huge], ["huge", huge], work("c", 0)],
        # A second pass of a model comes after the first.
        ["compute", work("c", 1), ["large", large], work("a", 1), work("b", 1)],
        *update,
        ["compute", *map(forward, MEMBERS)],
        ["compute", ["huge", huge], *(work(name, 2) for name in MEMBERS)],
        *update,
        *(["save", name, str(tmp_path / f"{name}-together"), True] for name in MEMBERS),
        ["update", "huge", {}],
        ["microbatches"],
    ]
    for rank, results in enumerate(run_ranks(script, world, **options, calls=calls)):
        first, second, scored, third = (results[place] for place in (5, 6, 10, 11))
        found = {
            "a": [first[0], second[2], scored[0], third[1]],
            "b": [first[1], second[3], scored[1], third[2]],
            "c": [first[4], second[0], scored[2], third[3]],
        }
        for number, name in enumerate(MEMBERS):
            passes = [[each] for each in found[name]]
            updates = results[7 + number], results[12 + number]
            assert_equal([*passes[:2], updates[0], *passes[2:], updates[1]], expected[name][rank])
        assert "there is no model 'gone'" in str(first[2])
        assert not results[-2][0] and results[-1] == 4
    for name in MEMBERS:
        alone = files(tmp_path / f"{name}-alone")
        assert all((tmp_path / f"{name}-together" / file).read_bytes() == made.read_bytes() for file, made in alone)


@pytest.mark.parametrize(("family", "flavour"), [("qwen2", "local"), ("mistral", "te")])
def test_models_share_a_microbatch_whose_tokens_are_split(run_ranks, models, family, flavour, tmp_path):
    """Sums over tokens are in another order. Without Transformer Engine the tokens of all are an odd number."""
    path, names = models[family], ("a", "b", "c")
    passes = {name: data_for("cross_entropy", place, counts=(7, 1, 30 - place)) for place, name in enumerate(names)}
    create = [["create", name, shape_of(path, 2 + place), place] for place, name in enumerate(names)]
    after = [["update", name, {}] for name in names]
    ways = {
        "together": [["compute", *passes.items()]],
        "apart": [["compute", each] for each in passes.items()],
    }
    found = {}
    for way, computed in ways.items():
        calls = [*create, *computed, *after, *computed, *after]
        calls += [["save", name, str(tmp_path / f"{name}-{way}"), False] for name in names]
        ranks = run_ranks(
            script, 2, flavour, model=path, trainer=LAYOUTS["tp2-sp"], calls=[*calls, ["microbatches"]], least=1
        )
        assert all(rank[-1] == (2 if way == "together" else 0) for rank in ranks)
        # The second passes, in which all factors matter.
        second = 3 + len(computed) + 3
        results = [[part for call in rank[second : second + len(computed)] for part in call] for rank in ranks]
        found[way] = [[rank[place] for rank in results] for place in range(3)]
    for name, together, apart in zip(names, found["together"], found["apart"], strict=True):
        assert_same(outputs(together, passes[name]), outputs(apart, passes[name]))
        apart = load_file(tmp_path / f"{name}-apart" / "adapter_model.safetensors")
        for factor, values in load_file(tmp_path / f"{name}-together" / "adapter_model.safetensors").items():
            torch.testing.assert_close(values, apart[factor], atol=1e-5, rtol=0, msg=factor)


def files(folder):
    found = [(file.name, file) for file in sorted(folder.iterdir())]
    assert [name for name, _ in found] == ["adapter_config.json", "adapter_model.safetensors", "optimizer.safetensors"]
    return found


def assert_equal(found, expected):
    """Results of two scripts are the same, bit for bit."""
    for one, other in zip(found, expected, strict=True):
        if isinstance(one, list):
            for part, like in zip(one, other, strict=True):
                assert (part.sequences, part.sums) == (like.sequences, like.sums)
                assert all(map(np.array_equal, part.logprobs, like.logprobs))
        else:
            assert one == other


def test_what_a_small_model_lacks_stays_exactly_zero(run_ranks, models, tmp_path):
    """Through steps with weight decay. All that is not in its folder is zero."""
    path, shape = models["qwen2"], shape_of(models["qwen2"], 2, attention=False)
    calls = [["create", "a", shape_of(path, 6), 3], ["compute", ["a", data_for("ppo")]], ["update", "a", {}]]
    calls.append(["create", "b", shape, 4])
    for given in (data_for("ppo"), data_for("cross_entropy"), data_for("dro")):
        calls += [["compute", ["b", given]], ["update", "b", {"weight_decay": 0.5, "eps": 1e-12}]]
    calls += [["save", "b", str(tmp_path / "b"), True], ["state", "b"]]
    (results,) = run_ranks(script, 1, model=path, trainer={}, calls=calls)
    params, moments = results[-1]
    factors = load_file(tmp_path / "b" / "adapter_model.safetensors")
    assert len(factors) == 2 * (3 * 3 + 1) and all("self_attn" not in name for name in factors)
    assert sum(int(param.count_nonzero()) for param in params) == sum(int(f.count_nonzero()) for f in factors.values())
    saved = load_file(tmp_path / "b" / "optimizer.safetensors")
    assert sum(int(each.count_nonzero()) for each in moments) == sum(int(m.count_nonzero()) for m in saved.values())
    assert all(factor.count_nonzero() == factor.numel() for factor in factors.values())


WRITERS = {"one": {}, "tp2": LAYOUTS["tp2"], "dp2": LAYOUTS["dp2"], "pp2": LAYOUTS["pp2"]}


@pytest.mark.parametrize(
    ("writer", "reader"), [("one", "one"), ("tp2", "dp2"), ("dp2", "dp2"), ("pp2", "one"), ("one", "tp2")]
)
def test_a_model_continues_on_ranks_of_any_topology(run_ranks, models, writer, reader, tmp_path):
    """Bit for bit on the same, otherwise within rounding."""
    path, shape = models["mistral"], shape_of(models["mistral"], 4)

    def step(given):
        return [["compute", ["a", given]], ["update", "a", {}]]

    def run(layout, calls):
        run_ranks(script, 1 if layout == "one" else 2, model=path, trainer=WRITERS[layout], calls=calls)

    first, second = step(data_for("cross_entropy")), step(data_for("ppo"))
    begin = [["create", "a", shape, 3], *first, *first, ["save", "a", str(tmp_path / "half"), True]]
    run(writer, [*begin, *second, ["save", "a", str(tmp_path / "whole"), True]])
    # Over the gradients of what was there before.
    before = [["create", "a", shape_of(path, 6), 8], *first[:1]]
    calls = [*before, ["load", "a", shape, str(tmp_path / "half"), True], *second]
    run(reader, [*calls, ["save", "a", str(tmp_path / "continued"), True]])
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        whole, continued = (load_file(tmp_path / run / name) for run in ("whole", "continued"))
        assert whole.keys() == continued.keys()
        for key, value in whole.items():
            # The second moments are squares of gradients around 100.
            tolerance = {"atol": 0, "rtol": 0} if writer == reader else {"atol": 1e-5, "rtol": 1e-4}
            torch.testing.assert_close(continued[key], value, **tolerance, msg=key)


def test_models_of_experts_compute_the_same_on_several_ranks(run_ranks, models, tmp_path):
    path, layouts = models["qwen3_moe"], {"one": {}, "tp2": LAYOUTS["tp2-sp"]}
    layouts["ep2"] = {"data_parallel": 2, "expert_parallel": 2, "tokens_per_microbatch": 64}
    results = {}
    for label, trainer in layouts.items():
        calls = [["create", "a", shape_of(path, 3), 3]]
        for given in (data_for("cross_entropy"), data_for("importance_sampling")):
            calls += [["compute", ["a", given]], ["update", "a", {}]]
        calls.append(["save", "a", str(tmp_path / label), True])
        ranks = run_ranks(script, 1 if label == "one" else 2, model=path, trainer=trainer, calls=calls)
        results[label] = [outputs([rank[place][0] for rank in ranks], data_for("cross_entropy")) for place in (1, 3)]
    one = load_file(tmp_path / "one" / "adapter_model.safetensors")
    for label in ("tp2", "ep2"):
        for found, expected in zip(results[label], results["one"], strict=True):
            assert_same(found, expected)
        for name, factor in load_file(tmp_path / label / "adapter_model.safetensors").items():
            torch.testing.assert_close(factor, one[name], atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_peft_reads_a_model_with_an_adapted_output_layer(run_ranks, models, family, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    path, given = models[family], data_for("cross_entropy")
    calls = [["create", "a", shape_of(path, 4), 3], ["compute", ["a", given]], ["update", "a", {}]]
    calls += [["save", "a", str(tmp_path / "peft"), False], ["compute", ["a", given]]]
    (results,) = run_ranks(script, 1, model=path, trainer={}, calls=calls)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(base, tmp_path / "peft")
    logprobs, _ = outputs([results[-1][0]], given)
    for datum, expected in zip(given["data"], logprobs, strict=True):
        targets = torch.tensor(datum["inputs"]["target_tokens"])
        with torch.no_grad():
            log_p = model(torch.tensor(datum["tokens"])[None]).logits[0].log_softmax(-1)
        torch.testing.assert_close(log_p.gather(1, targets[:, None])[:, 0], expected, atol=1e-5, rtol=1e-5)


def test_a_folder_of_other_adapters_or_without_moments_is_refused(run_ranks, models, tmp_path):
    path, shape = models["qwen2"], shape_of(models["qwen2"], 4)
    calls = [["create", "a", shape, 3], ["save", "a", str(tmp_path / "a"), False]]
    calls += [
        ["load", "b", shape_of(path, 2), str(tmp_path / "a"), False],
        ["load", "b", shape, str(tmp_path / "a"), True],
    ]
    calls += [["compute", ["b", data_for("ppo")]], ["load", "b", shape, str(tmp_path / "a"), False]]
    calls += [["compute", ["b", data_for("ppo")]]]
    (results,) = run_ranks(script, 1, model=path, trainer={}, calls=calls)
    assert "adapters with r=4, not 2" in results[2] and "optimizer.safetensors is missing" in results[3]
    assert "there is no model 'b'" in str(results[4][0]) and results[6][0].sequences


def test_an_unloaded_model_leaves_no_memory(run_ranks, models):
    path = models["qwen2"]
    calls = [["create", "a", shape_of(path, 4), 3], ["create", "b", shape_of(path, 4), 3], ["memory"]]
    for model in "cd":
        calls += [["create", model, shape_of(path, 4), 3], ["compute", [model, data_for("ppo")]], ["update", model, {}]]
        calls += [["compute", ["b", {**data_for("ppo"), "backward": False}]], ["memory"], ["unload", model], ["memory"]]
    (results,) = run_ranks(script, 1, model=path, trainer={}, calls=calls)
    before, *pairs = [result for result, call in zip(results, calls, strict=True) if call == ["memory"]]
    assert pairs[0] > 1.5 * before and pairs[1] < pairs[0] and pairs[1::2] == [pairs[1]] * 2
