"""What the client's own encoders write is read exactly, what it decodes is what the service said, the rest is refused.

`tinker.proto.request_conv` and `response_conv` are the client's.
"""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tinker")
pytestmark = pytest.mark.extra

from tinker import types  # noqa: E402
from tinker.proto import tinker_public_pb2 as pb  # noqa: E402
from tinker.proto.request_conv import forward_backward_request_to_proto  # noqa: E402
from tinker.proto.response_conv import (  # noqa: E402
    deserialize_forward_backward_output,
    deserialize_sample_response,
)

from megasync.errors import DataError  # noqa: E402
from megasync.service import wire  # noqa: E402
from megasync.service.interfaces import PassResult, SampledTokens, Samples, TopLogprobs  # noqa: E402
from megasync.service.requests import Failed, ModelReady, Saved, Updated  # noqa: E402

MIB = 1 << 20
seeds = st.integers(0, 2**32 - 1)
lengths = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def request_of(data, loss="cross_entropy", config=None, seq=3):
    given = types.ForwardBackwardInput(data=data, loss_fn=loss, loss_fn_config=config)
    return types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=seq)


def encoded(data, **options):
    return forward_backward_request_to_proto(request_of(data, **options)).SerializeToString()


def one(tokens=(1, 2, 3), **inputs):
    inputs = inputs or {"target_tokens": np.array([2, 3, 4])}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


# Passes


@settings(deadline=None)
@given(lengths, seeds, st.integers(0, 3))
def test_data_are_read_as_the_client_had_them(sizes, seed, chunks):
    rng = np.random.default_rng(seed)
    data = []
    for size in sizes:
        parts = np.array_split(rng.integers(0, 2**31 - 1, size), chunks + 1)
        pieces = [types.EncodedTextChunk(tokens=part.tolist()) for part in parts]
        inputs = {
            "target_tokens": rng.integers(0, 2**62, (size, 2)),
            "weights": rng.normal(size=(size, 2)).astype(np.float32),
            "advantages": rng.normal(size=size).astype(np.float32),
        }
        data.append(types.Datum(model_input=types.ModelInput(chunks=pieces), loss_fn_inputs=inputs))
    config = {"kl_coeff": 0.25, "mode": "b"}
    read = wire.read_compute(encoded(data, loss="ppo", config=config), MIB)
    assert (read.model, read.seq) == ("m", 3)
    assert (read.work.loss, dict(read.work.config), read.work.backward) == ("ppo", config, True)
    for mine, theirs in zip(read.work.data, data, strict=True):
        assert mine.tokens.dtype == np.int64 and mine.tokens.tolist() == theirs.model_input.to_ints()
        assert set(mine.inputs) == set(theirs.loss_fn_inputs)
        for name, array in mine.inputs.items():
            sent = theirs.loss_fn_inputs[name].to_numpy()
            assert array.dtype == sent.dtype and np.array_equal(array, sent)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 20), seeds, st.floats(0, 1))
def test_sparse_matrices_become_the_dense_ones_they_stand_for(rows, columns, seed, density):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    matrix = np.where(rng.random((rows, columns)) < density, rng.normal(size=(rows, columns)), 0).astype(np.float32)
    tensor = types.TensorData.from_torch_sparse(torch.from_numpy(matrix))
    read = wire.read_compute(encoded([one(range(rows), weights=tensor)]), MIB)
    assert np.array_equal(read.work.data[0].inputs["weights"], matrix)


def test_only_the_forward_pass_is_asked_for():
    message = forward_backward_request_to_proto(request_of([one()]))
    message.forward_only = True
    assert not wire.read_compute(message.SerializeToString(), MIB).work.backward


def test_provenance_numbers_the_sampled_sequences_of_a_datum():
    sampled, prompt = types.SampledProvenanceSpan, types.PromptProvenanceSpan
    inputs = [prompt(sequence_id="p", length=1), sampled(sequence_id="a", length=2)]
    targets = [
        prompt(sequence_id="p", length=1),
        sampled(sequence_id="b", length=1),
        sampled(sequence_id="a", length=1),
    ]
    datum = one().with_provenance(inputs, targets)
    read = wire.read_compute(encoded([datum]), MIB)
    assert read.work.data[0].inputs[wire.SEQUENCE].tolist() == [-1, 0, 1]


def _with(change):
    message = forward_backward_request_to_proto(request_of([one(), one()]))
    change(message)
    return message.SerializeToString()


def _image(message):
    message.data[1].model_input.add().image.data = b"x"


def _sparse(shape, rows, columns, values=(1, 2)):
    def change(message):
        tensor = message.data[1].loss_fn_inputs["target_tokens"]
        tensor.shape[:] = shape
        tensor.sparse_csr.values = np.array(values, np.int64).tobytes()
        tensor.sparse_csr.crow_indices = np.array(rows, np.int64).tobytes()
        tensor.sparse_csr.col_indices = np.array(columns, np.int64).tobytes()

    return change


def _set(**fields):
    def change(message):
        for name, value in fields.items():
            setattr(message, name, value)

    return change


def _tensor(**fields):
    def change(message):
        tensor = message.data[1].loss_fn_inputs["target_tokens"]
        for name, value in fields.items():
            if name == "shape":
                tensor.shape[:] = value
            else:
                setattr(tensor, name, value)

    return change


def _span(field="loss_fn_input_spans"):
    def change(message):
        getattr(message.data[1], field).add().sampled_tokens.length = 3

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_set(model_id=""), "model_id is missing"),
        (_set(seq_id=-1), "seq_id is missing, negative or too large"),
        (_set(loss_fn="dpo"), "loss_fn='dpo' is none of cross_entropy, importance_sampling, ppo"),
        (_set(loss_fn="custom"), "the client computes a custom loss itself"),
        (lambda message: message.ClearField("data"), "data is empty"),
        (lambda message: message.data.extend([pb.Datum()] * 20_000), "data has 20002 entries"),
        (lambda message: message.data[1].model_input.extend([pb.Chunk()] * 300_000), "chunks, inputs and spans"),
        (
            lambda message: message.data[1].loss_fn_inputs[wire.SEQUENCE].MergeFrom(pb.Tensor()),
            "is made of the datum's spans",
        ),
        (_image, "data[1].model_input.chunks[1] is of type 'image'"),
        (_tensor(dense=b"xyz"), "data[1].loss_fn_inputs['target_tokens'] has 3 bytes"),
        (_tensor(dtype=pb.DTYPE_BFLOAT16), "takes float32 and int64"),
        (_tensor(dtype=99), "has dtype 99"),
        (_tensor(shape=[2]), "has 3 values, which do not fill its shape [2]"),
        (_tensor(shape=[-1, -3]), "do not fill its shape [-1, -3]"),
        (_tensor(shape=[2**63 - 1, 2]), "do not fill its shape"),
        (_tensor(shape=[1, 1, 3]), "it has one or two dimensions"),
        (_sparse([3], [0, 2], [0, 1]), "a sparse tensor has two dimensions"),
        (_sparse([2**40, 2**40], [0, 2], [0, 1]), "and 1048552 are left for the request"),
        (_sparse([1, 2], [0, 2, 2], [0, 1]), "do not fit its shape [1, 2]"),
        (_sparse([1, 2], [0, 2], [0, 2]), "do not fit its shape [1, 2]"),
        (_sparse([1, 2], [0, 2], [0, -1]), "do not fit its shape [1, 2]"),
        (_sparse([2, 2], [0, 3, 2], [0, 1]), "do not fit its shape [2, 2]"),
        (_sparse([2, 2], [1, 1, 2], [0, 1]), "do not fit its shape [2, 2]"),
        (_sparse([1, 2], [], []), "do not fit its shape [1, 2]"),
        (_span(), "data[1].model_input_spans covers 0 positions of 3"),
        (_span("model_input_spans"), "data[1].model_input_spans[0] names no sequence"),
    ],
)
def test_what_is_wrong_with_a_pass_is_named(change, words):
    with pytest.raises(DataError) as error:
        wire.read_compute(_with(change), MIB)
    assert words in str(error.value)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 300), st.integers(0, 255))
def test_damaged_messages_are_read_or_refused(garbage, place, value):
    """Nothing else leaves the decoder, whatever the bytes."""
    sound = bytearray(encoded([one(), one((4, 5), weights=np.ones((2, 3), np.float32))]))
    sound[place % len(sound)] = value
    for body in (garbage, bytes(sound)):
        with suppress(DataError):
            wire.read_compute(body, MIB)


def field(number, content):
    """A field of protobuf with a length."""
    size, length = len(content), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


DESCRIPTOR = pb.ForwardBackwardRequest.DESCRIPTOR
DATA = DESCRIPTOR.fields_by_name["data"].number
INPUTS = pb.Datum.DESCRIPTOR.fields_by_name["loss_fn_inputs"].number
SHAPE = pb.Tensor.DESCRIPTOR.fields_by_name["shape"].number
VALUE = 2
MANY = {
    "data": field(DATA, b"") * (wire._MOST_FIELDS + 1),
    "inputs": field(DATA, field(INPUTS, b"") * (wire._MOST_FIELDS + 1)),
    "packed numbers": field(DATA, field(INPUTS, field(VALUE, field(SHAPE, b"\x01" * 2 * wire._MOST_FIELDS)))),
    "unknown fields": b"\xf8\x7f\x01" * (wire._MOST_FIELDS + 1),
}


@pytest.mark.parametrize("body", MANY.values(), ids=MANY.keys())
def test_a_body_of_many_small_parts_is_refused_before_it_is_parsed(body):
    with pytest.raises(DataError, match="more than 1048576 fields"):
        wire.read_compute(body, 64 * MIB)


def test_values_of_json_are_counted_before_they_are_parsed(monkeypatch):
    monkeypatch.setattr(wire.orjson, "loads", None)
    with pytest.raises(DataError, match="more than 4194304 values"):
        wire.read_json(b'{"x":[' + b"[]," * wire._MOST_VALUES + b"[]]}")


MIXED = [1] * 65 + [1.5]
MANY_WRONG = {
    "objects": ("asample", {"prompt": {"chunks": [{"a": 1}] * 20_000}}, "more than 16384 values"),
    "chunks": ("asample", {"prompt": {"chunks": [{"tokens": [1]}] * 6_000}}, "more than 16384 values"),
    "fractions": ("asample", {"prompt": {"chunks": [{"tokens": MIXED * 300}]}}, "more than 16384 values"),
    "texts of numbers": (
        "asample",
        {"prompt": {"chunks": [{"tokens": ["1"] * 65 + ["a"] * 20_000}]}},
        "more than 16384 values",
    ),
    "truths": ("asample", {"prompt": {"chunks": [{"tokens": [True] * 20_000}]}}, "more than 16384 values"),
    "fields": ("asample", {"prompt": {"chunks": []}, "x": {str(i): 1 for i in range(20_000)}}, "more than 16384"),
    "numbers for texts": ("session", {"tags": [1] * 200_000}, "CreateSessionRequest.tags.0: Input should be"),
    "depth": ("session", {"tags": []}, "too deep in one another"),
}


@pytest.mark.parametrize(("kind", "body", "words"), MANY_WRONG.values(), ids=MANY_WRONG.keys())
def test_many_wrong_values_cost_no_more_than_some(kind, body, words):
    data = json.dumps({"sampling_params": {}} | body if kind == "asample" else body).encode()
    if words.startswith("too deep"):
        data = b'{"tags":' + b"[" * 1_000 + b"]" * 1_000 + b"}"
    with pytest.raises(DataError, match=words):
        tracemalloc.start()
        try:
            wire.read_sample(data, MIB) if kind == "asample" else wire.read(data, "CreateSessionRequest")
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    assert peak < 30 * MIB


def test_a_long_prompt_in_parts_is_read_whole():
    chunks = [{"type": "encoded_text", "tokens": list(range(size))} for size in (1, 64, 65, 100_000)]
    body = {"prompt": {"chunks": chunks}, "sampling_params": {"stop": list(range(1_000))}}
    read = wire.read_sample(json.dumps(body).encode(), MIB).sampling
    assert read.prompt.tolist() == [token for chunk in chunks for token in chunk["tokens"]]
    assert list(read.stop) == list(range(1_000))


def test_a_large_body_of_many_data_is_read():
    tokens = np.arange(1, 300)
    data = [one(tokens, target_tokens=tokens, weights=np.ones(299, np.float32)) for _ in range(600)]
    body = encoded(data)
    assert len(body) > wire._COUNTED_BYTES and len(wire.read_compute(body, 64 * MIB).work.data) == 600


@given(st.binary(max_size=200))
def test_counting_refuses_nothing_that_is_small(body):
    wire._check_parts(body, DESCRIPTOR)


def test_compressed_bodies_are_whole_and_bounded():
    body = bytes(100) * 50_000
    zipped = zstandard.ZstdCompressor().compress(body)
    streaming = zstandard.ZstdCompressor().compressobj()
    without_size = streaming.compress(body) + streaming.flush()
    for each, words in ((zipped, "5000000 bytes large"), (without_size, "of at most 4999999 bytes")):
        assert wire.unzip(each, len(body)) == body
        with pytest.raises(DataError, match=words):
            wire.unzip(each, len(body) - 1)
    for each in (b"", b"no zstd", zipped[:-1], without_size[:-1], zipped + b"x", zipped + zipped):
        with pytest.raises(DataError, match="not one whole frame of zstd"):
            wire.unzip(each, 2 * len(body))


# Outcomes


@settings(deadline=None)
@given(lengths, seeds, st.booleans())
def test_the_client_decodes_what_a_pass_computed(sizes, seed, ragged):
    rng = np.random.default_rng(seed)
    outputs = []
    for size in sizes:
        shape = (size, int(rng.integers(1, 4))) if ragged else (size,)
        outputs.append({"logprobs": rng.normal(size=shape).astype(np.float32), "x": rng.normal(size=size).astype("f4")})
    decoded = deserialize_forward_backward_output(wire.write_protobuf(PassResult(outputs, {"loss:sum": 1.5})))
    assert decoded.metrics == {"loss:sum": 1.5}
    assert len(decoded.loss_fn_outputs) == len(outputs)
    for theirs, mine in zip(decoded.loss_fn_outputs, outputs, strict=True):
        assert set(theirs) == set(mine)
        for name, array in mine.items():
            assert np.array_equal(theirs[name].to_numpy(), array) and theirs[name].shape == list(array.shape)


def sampled(rng, count, k=0):
    logprobs = rng.normal(size=count).astype(np.float32)
    top = TopLogprobs(rng.integers(0, 99, (count, k)), rng.normal(size=(count, k)).astype(np.float32)) if k else None
    return SampledTokens(rng.integers(0, 99, count), logprobs, bool(rng.integers(2)), [("a", 0, count)], top)


@settings(deadline=None)
@given(seeds, st.integers(1, 4), st.integers(0, 9), st.integers(1, 5))
def test_the_client_decodes_what_was_sampled(seed, count, tokens, k):
    rng = np.random.default_rng(seed)
    prompt = rng.normal(size=6).astype(np.float32)
    prompt[:2] = np.nan
    top = TopLogprobs(rng.integers(1, 99, (6, k)), rng.normal(size=(6, k)).astype(np.float32))
    top.logprobs[0] = np.nan
    targets = rng.normal(size=(5, 2)).astype(np.float32)
    targets[1, 1] = np.nan
    samples = Samples([sampled(rng, tokens, k) for _ in range(count)], prompt, top, targets, 4)
    decoded = deserialize_sample_response(wire.write_protobuf(samples))
    for theirs, mine in zip(decoded.sequences, samples.samples, strict=True):
        assert theirs.tokens == mine.ids.tolist() and theirs.stop_reason == ("stop" if mine.stopped else "length")
        if tokens:
            assert np.array_equal(theirs.logprobs_np, mine.logprobs)
            assert np.array_equal(theirs.topk_logprobs_np.token_ids, mine.topk.ids)
            assert np.array_equal(theirs.topk_logprobs_np.logprobs, mine.topk.logprobs)
    assert np.array_equal(decoded.prompt_logprobs_np, prompt, equal_nan=True)
    assert decoded.topk_prompt_logprobs[0] is None and len(decoded.topk_prompt_logprobs[1]) == k
    assert decoded.target_prompt_logprobs.to_numpy()[1, 1] == 0.0
    assert decoded.prompt_cache_hit_tokens == 4
    plain = json.loads(wire.write_json(samples))
    assert plain["weight_versions"] == [[["a", 0, tokens]]] * count
    assert [each["tokens"] for each in plain["sequences"]] == [each.ids.tolist() for each in samples.samples]


@pytest.mark.parametrize(
    ("outcome", "kind", "fields"),
    [
        (ModelReady("m"), types.CreateModelResponse, {"model_id": "m"}),
        (ModelReady("m", "tinker://m/weights/a"), types.LoadWeightsResponse, {"path": "tinker://m/weights/a"}),
        (ModelReady("m"), types.UnloadModelResponse, {"model_id": "m"}),
        (Saved("tinker://m/weights/a"), types.SaveWeightsResponse, {"path": "tinker://m/weights/a"}),
        (Updated({"grad_norm:mean": 2.0}), types.OptimStepResponse, {"metrics": {"grad_norm:mean": 2.0}}),
        (Failed("why", "user"), types.RequestFailedResponse, {"error": "why", "category": "user"}),
    ],
)
def test_the_client_reads_other_outcomes(outcome, kind, fields):
    read = kind.model_validate_json(wire.write_json(outcome))
    assert {name: getattr(read, name) for name in fields} == fields


def test_a_metric_that_is_no_number_reaches_the_client():
    read = types.OptimStepResponse.model_validate_json(wire.write_json(Updated({"norm:max": float("nan")})))
    assert np.isnan(read.metrics["norm:max"])


# JSON requests


def body_of(message):
    return message.model_dump_json(exclude_none=True).encode()


def sample_of(prompt=(1, 2, 3, 4), **fields):
    params = types.SamplingParams(**fields.pop("params", {}))
    return types.SampleRequest(
        sampling_session_id="s",
        seq_id=7,
        prompt=types.ModelInput.from_ints(list(prompt)),
        sampling_params=params,
        **fields,
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**40), max_size=50), st.sampled_from([None, [], "a", ["a", "b"], [3, 4]]))
def test_a_sampling_request_is_read_as_the_client_had_it(tokens, stop):
    params = {"max_tokens": 5, "seed": 2**63, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "stop": stop}
    read = wire.read_sample(body_of(sample_of(tokens, num_samples=3, topk_sample_logprobs=2, params=params)), MIB)
    sampling = read.sampling
    assert (read.sampler, read.seq, sampling.prompt.tolist(), sampling.samples) == ("s", 7, tokens, 3)
    assert (sampling.max_tokens, sampling.seed, sampling.temperature) == (5, 1, 0.5)
    assert (sampling.top_k, sampling.top_p, sampling.topk_sample_logprobs) == (3, 0.5, 2)
    assert list(sampling.stop) == (["a"] if stop == "a" else stop or [])
    assert sampling.stop_at_eos == (stop != [])


@pytest.mark.parametrize(
    ("fields", "scored"),
    [({}, 0), ({"prompt_logprobs": True}, 4), ({"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, 2)],
)
def test_the_end_of_the_prompt_is_scored(fields, scored):
    assert wire.read_sample(body_of(sample_of(**fields)), MIB).sampling.prompt_logprobs == scored


def tensor_of(data, shape, **fields):
    return {"data": data, "dtype": "int64", "shape": shape} | fields


def test_targets_of_a_prompt_are_dense_and_ask_for_nothing_where_they_were_not_listed():
    csr = tensor_of([5, 6], [3, 2], sparse_crow_indices=[0, 1, 1, 2], sparse_col_indices=[1, 0])
    read = wire.read_sample(body_of(sample_of(target_prompt_logprobs=csr)), MIB)
    assert read.sampling.target_prompt_logprobs.tolist() == [[-1, 5], [-1, -1], [6, -1]]
    dense = tensor_of([1, 2, 3], [3, 1])
    read = wire.read_sample(body_of(sample_of(target_prompt_logprobs=dense)), MIB)
    assert read.sampling.target_prompt_logprobs.tolist() == [[1], [2], [3]]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"prompt": {"chunks": [{"type": "image", "data": "", "format": "png"}]}},
            "prompt.chunks[0] is of type 'image'",
        ),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1.5]}]}}, "SampleRequest.prompt.chunks.0"),
        ({"prompt": {"chunks": [5]}}, "prompt.chunks[0] is of type None"),
        ({"prompt": 3}, "SampleRequest.prompt"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k=2 is not supported"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "between 1 and 3"),
        ({"prompt_logprobs_last_n": 1}, "needs prompt_logprobs"),
        ({"target_prompt_logprobs": tensor_of([1], [1])}, "shape [prompt - 1, K], not int64 of [1]"),
        ({"target_prompt_logprobs": tensor_of([1], [2, 1])}, "do not fill its shape [2, 1]"),
        ({"target_prompt_logprobs": tensor_of([2**70], [1, 1])}, "not a whole number of 64 bits"),
        ({"target_prompt_logprobs": tensor_of([1.5], [1, 1])}, "not a whole number of 64 bits"),
        ({"prompt": {"chunks": [{"type": "encoded_text", "tokens": [2**63]}]}}, "prompt.chunks[0].tokens has a value"),
        ({"seq_id": -1}, "seq_id is missing, negative or too large"),
        ({"new_field": 1}, "SampleRequest.new_field: Extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_with_a_sampling_request_is_named(fields, words):
    body = json.loads(body_of(sample_of())) | fields
    with pytest.raises(DataError) as error:
        wire.read_sample(json.dumps(body).encode(), MIB)
    assert words in str(error.value)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
READERS = (
    wire.read_create_model,
    wire.read_optim_step,
    wire.read_save_weights,
    wire.read_save_for_sampler,
    lambda body: wire.read_load_weights(body, "b"),
    lambda body: wire.read_sample(body, MIB),
)
SOUND = {
    "model_id": "m",
    "seq_id": 1,
    "session_id": "s",
    "model_seq_id": 1,
    "base_model": "b",
    "lora_config": {"rank": 4},
    "adam_params": {"learning_rate": 1},
    "path": "p",
    "optimizer": False,
    "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
    "sampling_params": {},
    "target_prompt_logprobs": {"data": [], "dtype": "int64", "shape": [0, 1]},
}
FIELDS = (
    {"session_id", "model_seq_id", "base_model", "lora_config"},
    {"model_id", "seq_id", "adam_params"},
    {"model_id", "seq_id", "path"},
    {"model_id", "seq_id", "path"},
    {"session_id", "model_seq_id", "path", "optimizer"},
    {"prompt", "sampling_params", "base_model", "target_prompt_logprobs"},
)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(range(len(READERS))), st.data())
def test_whatever_a_field_has_the_request_is_read_or_refused(reader, data):
    body = {name: SOUND[name] for name in FIELDS[reader]}
    READERS[reader](json.dumps(body).encode())
    part = body
    path = data.draw(st.sampled_from(sorted(body)))
    while isinstance(part[path], dict) and part[path] and data.draw(st.booleans()):
        part[path] = dict(part[path])
        part = part[path]
        path = data.draw(st.sampled_from(sorted(part)))
    part[path] = data.draw(anything)
    with suppress(DataError):
        READERS[reader](json.dumps(body).encode())


def test_adapters_without_a_seed_are_the_same_for_a_repeated_request():
    def asked(**lora):
        config = types.LoraConfig(rank=8, **lora)
        return types.CreateModelRequest(session_id="s", model_seq_id=1, base_model="b", lora_config=config)

    first, again = (wire.read_create_model(body_of(asked(train_mlp=False))) for _ in range(2))
    assert first == again and not first.adapters.mlp and first.adapters.attention
    assert wire.read_create_model(body_of(asked(seed=5))).adapters.seed == 5


@pytest.mark.parametrize(
    ("reader", "body", "words"),
    [
        (wire.read_create_model, {"session_id": "s", "model_seq_id": 0, "base_model": "b"}, "lora_config is missing"),
        (wire.read_create_model, {"session_id": "s"}, "CreateModelRequest.model_seq_id: Field required"),
        (
            wire.read_create_model,
            {"session_id": "s", "model_seq_id": 0, "base_model": "b", "optimizer_config": {"type": "dimuon"}},
            "optimizer_config.type='dimuon'",
        ),
        (
            wire.read_optim_step,
            {"model_id": "m", "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 1}},
            "'dimuon' is not supported",
        ),
        (wire.read_optim_step, {"model_id": "m", "adam_params": {}}, "seq_id is missing"),
        (
            wire.read_optim_step,
            {"model_id": "m", "seq_id": 1, "adam_params": {"lr": 1}},
            "OptimStepRequest.adam_params.AdamParams.lr: Extra",
        ),
        (wire.read_save_for_sampler, {"model_id": "m", "seq_id": 1}, "give either path or sampling_session_seq_id"),
        (
            lambda b: wire.read_load_weights(b, "b"),
            {"path": "p", "optimizer": False},
            "give either model_id and seq_id",
        ),
        (
            lambda b: wire.read_load_weights(b, "b"),
            {"path": "p", "optimizer": False, "model_id": "m", "seq_id": 1, "base_model": "c"},
            "base_model='c'; the service trains 'b'",
        ),
        (
            lambda b: wire.read_load_weights(b, "b"),
            {"path": "p", "optimizer": False, "model_id": "m", "seq_id": 1, "weights_access_token": "t"},
            "weights_access_token is not supported",
        ),
    ],
)
def test_what_is_wrong_with_other_requests_is_named(reader, body, words):
    with pytest.raises(DataError) as error:
        reader(json.dumps(body).encode())
    assert words in str(error.value)


@pytest.mark.parametrize("body", [b"{", b"[1]", b'"x"', b"\xff", b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_refused(body):
    with pytest.raises(DataError, match="body"):
        wire.read_json(body)


def test_a_client_is_not_told_where_servers_are():
    outcome = Failed("POST http://10.0.0.7:31000/generate: status 400: top_p must be in (0, 1]; see https://[::1]:8/x")
    said = json.loads(wire.write_json(outcome))["error"]
    assert said == "POST a server/generate: status 400: top_p must be in (0, 1]; see a server/x"
