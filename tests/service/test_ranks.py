"""What clients send is checked before ranks see it, and answers of ranks become those of clients."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from megasync.errors import DataError, TrainingError
from megasync.service.interfaces import Adam, AdapterSpec, Datum, Pass, ServedModel
from megasync.service.ranks import Ranks, checked
from megasync.tenants.passes import PassPart

SERVED = ServedModel("m", context=6, vocab=10, rank=8)
KINDS = {"attention": {"q_proj", "k_proj", "v_proj"}, "mlp": {"down_proj"}, "unembed": {"lm_head"}}


def datum(tokens=(1, 2, 3), **inputs):
    given = {"target_tokens": [2, 3, 4], "logprobs": [-1.0, -2.0, -3.0], "advantages": [0.0, 1.0, -1.0], **inputs}
    columns = {name: np.array(values) for name, values in given.items() if values is not None}
    return Datum(np.array(tokens), columns)


def work(*data, loss="ppo", **config):
    return Pass(loss, config, data, True)


PLAIN = {"logprobs": None, "advantages": None}
REFUSED = {
    "no loss": (work(datum(), loss="hinge"), "'hinge' is unknown; it must be one of cross_entropy"),
    "closed": (work(datum(), loss="stable_reinforce"), "'stable_reinforce' is not supported: its objective"),
    "option": (work(datum(), beta=1.0), "ppo has no option 'beta' in loss_fn_config; it has clip_low_threshold"),
    "text": (work(datum(), clip_low_threshold="low"), "clip_low_threshold='low'"),
    "no options": (work(datum(**PLAIN), loss="cross_entropy", weights=2.0), "no option 'weights'"),
    "target": (work(datum(), datum(target_tokens=[1, -1, 3])), "datum 1 has the id -1 in its target_tokens"),
    "no targets": (work(datum(target_tokens=None)), "no input 'target_tokens', which ppo requires"),
    "short": (work(datum(target_tokens=[1, 2])), "target_tokens of shape [2], but 3 tokens; ppo needs [3]"),
    "wide": (work(datum(target_tokens=[[1], [2], [3]])), "of shape [3, 1], but 3 tokens; ppo needs [3]"),
    "no width": (
        work(datum(target_tokens=np.zeros((3, 0), int), **PLAIN), loss="cross_entropy"),
        "needs [3] or [3, targets]",
    ),
    "no input": (work(datum(advantages=None)), "datum 0 has no input 'advantages'"),
    "shape": (work(datum(advantages=[1.0])), "advantages of shape [1], but target_tokens of shape [3]"),
    "nan": (
        work(datum(), datum(logprobs=[0.0, np.nan, 0.0])),
        "datum 1 has NaN, infinity or no numbers in its logprobs",
    ),
    "infinity": (work(datum(logprobs=[0.0, -np.inf, 0.0])), "infinity"),
    "too large": (work(datum(advantages=[1e39, 0.0, 0.0])), "infinity"),
    "unknown": (work(datum(mask=[1.0] * 3)), "datum 0 has the input 'mask', which ppo does not read; it reads"),
    "empty mask": (
        work(datum(sequence_ratio_mask=[0.0] * 3), loss="gspo"),
        "datum 0 has a sequence_ratio_mask of zeros",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_client_must_change_is_named(case):
    given, text = REFUSED[case]
    with pytest.raises(DataError) as refused:
        checked(given, SERVED)
    assert text in str(refused.value)


def test_columns_have_every_target_and_default():
    several = datum((5, 6), target_tokens=[[1, 2, 3], [4, 5, 6]], weights=[[0.5, 0, 1], [2, 0, 0]], **PLAIN)
    one = datum(sampled_sequence=[-1, 0, 0], **PLAIN)
    columns = checked(work(several, one, loss="cross_entropy"), SERVED)
    assert columns.lengths.tolist() == [2, 3] and columns.widths.tolist() == [3, 1]
    assert columns.tokens.tolist() == [5, 6, 1, 2, 3] and columns.targets_of(0).tolist() == [1, 2, 3, 4, 5, 6]
    assert columns.inputs["weights"].tolist() == [0.5, 0, 1, 2, 0, 0, 1, 1, 1]
    # One threshold of a datum for each token, the other of the configuration of the pass.
    clipped = checked(work(datum(clip_low_threshold=[0.1, 0.2, 0.3]), datum(), clip_high_threshold=3), SERVED)
    assert clipped.inputs["clip_low_threshold"].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.8, 0.8, 0.8])
    assert clipped.inputs["clip_high_threshold"].tolist() == [3.0] * 6


class Group:
    """A trainer group whose ranks answer as they are told."""

    def __init__(self, *answers):
        self.answers, self.calls = list(answers), []

    async def on_all(self, timeout, method, *arguments):
        self.calls.append((timeout, method.__name__, *arguments))
        return self.answers.pop(0)


def ranks(*answers):
    made = object.__new__(Ranks)
    made._group, made._timeouts, made._served, made._kinds = (
        Group(*answers),
        SimpleNamespace(train_step=9.0),
        SERVED,
        KINDS,
    )
    return made


def test_ranks_answer_for_the_sequences_that_they_computed():
    log_p = np.arange(6, dtype=np.float32)
    wide = datum((5, 6), target_tokens=[[1, 2, 3], [4, 5, 6]], **PLAIN)
    passes = [
        ("a", work(datum(**PLAIN), wide, loss="cross_entropy")),
        ("b", work(datum(advantages=None))),
        ("c", work(datum())),
    ]
    silent = PassPart((), (), {})
    answers = [
        [PassPart((1,), (log_p,), {"loss": 1.5}), TrainingError("c is gone")],
        [silent, TrainingError("c is gone")],
        [PassPart((0,), (log_p[:3],), {"loss": 2.0}), TrainingError("c is gone")],
    ]
    trainer = ranks(answers)
    result, refused, failed = asyncio.run(trainer.compute(passes))
    assert [output["logprobs"].tolist() for output in result.outputs] == [[0, 1, 2], [[0, 1, 2], [3, 4, 5]]]
    assert result.metrics == {"loss:sum": 3.5}
    assert isinstance(refused, DataError) and "c is gone" in str(failed)
    # The refused pass was not sent, and the others have their time.
    ((timeout, method, sent),) = trainer._group.calls
    assert (timeout, method, [model for model, _ in sent]) == (18.0, "compute_passes", ["a", "c"])


def test_nothing_is_sent_if_all_passes_are_refused():
    trainer = ranks()
    (refused,) = asyncio.run(trainer.compute([("a", work(datum(), loss="hinge"))]))
    assert isinstance(refused, DataError) and not trainer._group.calls


def test_adapters_of_a_model_are_those_that_it_names():
    trainer = ranks(None)
    asyncio.run(trainer.create("a", AdapterSpec(4, seed=7, mlp=False)))
    ((_, method, model, shape, seed),) = trainer._group.calls
    assert (method, model, seed, shape.rank, shape.scale) == ("create_model", "a", 7, 4, 8.0)
    assert shape.targets == ("k_proj", "lm_head", "q_proj", "v_proj")


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (AdapterSpec(9, 0), "the rank of adapters is 9; it must be from 1 to 8"),
        (AdapterSpec(0, 0), "the rank of adapters is 0"),
        (AdapterSpec(2, 0, False, False, False), "nothing would be trained"),
    ],
)
def test_adapters_that_ranks_cannot_hold_are_refused(spec, text):
    with pytest.raises(DataError) as refused:
        asyncio.run(ranks().create("a", spec))
    assert text in str(refused.value)


def test_a_skipped_step_says_so():
    trainer = ranks([(False, float("nan"))] * 2)
    metrics = asyncio.run(trainer.update("a", Adam(1e-3, grad_clip_norm=-1.0)))
    assert metrics == {"skipped:sum": 1.0}
    assert trainer._group.calls[0][-1].clip_grad == 0.0


@pytest.mark.parametrize(
    "options", [{"beta1": 1.0}, {"eps": -1.0}, {"eps": 0.0}, {"eps": 1e-60}, {"weight_decay": float("nan")}]
)
def test_parameters_of_no_step_are_refused(options):
    with pytest.raises(DataError) as refused:
        asyncio.run(ranks().update("a", Adam(1e-3, **options)))
    assert next(iter(options)) in str(refused.value)
