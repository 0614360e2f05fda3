"""Tinker's wire formats: protobuf and JSON of its client to `requests`, and outcomes to protobuf and JSON.

Invariant: what leaves `read_*` has the shapes and types that `interfaces` promises, and its tensors took no more memory
than its `limit`; everything else is a DataError that names the field. The parts of a large body are counted before it
is parsed (`_check_parts`, `read_json`), because the smallest take far more memory than their bytes, and what is wrong
with each of them even more (`_shortened`). Tokens are moved by NumPy, never one by one. A sparse tensor becomes a dense
one, whose missing cells are 0 (in `target_prompt_logprobs` -1, which asks for nothing).

The client's own modules, of the extra `serve`, say what a message contains. Only this module imports them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar, cast, get_args

import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray

from megasync.errors import ConfigError, DataError
from megasync.service.interfaces import (
    Adam,
    AdapterSpec,
    Datum,
    Floats,
    Ints,
    Pass,
    PassResult,
    SampledTokens,
    Samples,
    Sampling,
    TopLogprobs,
)
from megasync.service.requests import (
    Compute,
    CreateModel,
    Failed,
    LoadWeights,
    ModelReady,
    OptimStep,
    Outcome,
    Sample,
    Saved,
    SaveForSampler,
    SaveWeights,
    UnloadModel,
    Updated,
)

try:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import DecodeError
    from pydantic import BaseModel, ValidationError
    from tinker import types  # pyright: ignore[reportMissingImports]
    from tinker.proto import tinker_public_pb2 as pb  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ConfigError(
        f"the training service needs the package {error.name}, which has the messages of Tinker's client; install "
        "megasync[serve] (`megasync install serve`)"
    ) from error

Wire = TypeVar("Wire", bound=BaseModel)

_ADDRESS = re.compile(r"https?://[^/\s]+")
# Which sampled sequence of the datum each target is of, from the spans of a datum; see `Datum`.
SEQUENCE = "sampled_sequence"
# Data of one request, and parts of all of them together: chunks, inputs and spans. The client sends up to 1,024 data.
_MOST_DATA, _MOST_PARTS = 1 << 14, 1 << 18
# Messages and fields that a body in protobuf may have, and values that one in JSON may have, of up to 100 bytes each.
_MOST_FIELDS, _MOST_VALUES = 1 << 20, 1 << 22
# Values of a body in JSON besides lists of token ids: some 10 kB for each that is wrong. And how long such a list is.
_MOST_OTHERS, _LONG_LIST = 1 << 14, 64
# A field has two bytes at least, so shorter bodies need no count.
_COUNTED_BYTES = 2 * _MOST_FIELDS
# What a cell of top log-probs without a token has.
_NO_LOGPROB = -99999.0
_LOSSES = tuple(name for name in get_args(types.LossFnType) if name != "custom")
_DTYPES: dict[int, type[np.generic]] = {
    pb.DTYPE_FLOAT32: np.float32,
    pb.DTYPE_INT64: np.int64,
    pb.DTYPE_INT32: np.int32,
}


# Requests


def unzip(body: bytes, limit: int) -> bytes:
    """Decompresses a frame of zstd into at most ``limit`` bytes. Raises DataError for more, and for anything else."""
    try:
        size = zstandard.get_frame_parameters(body).content_size
        if size != zstandard.CONTENTSIZE_UNKNOWN and size > limit:
            raise DataError(
                f"the body is {size} bytes large when decompressed, and {limit} are allowed; send less at once"
            )
        return zstandard.ZstdDecompressor().decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DataError(
            f"the body is not one whole frame of zstd of at most {limit} bytes, although its Content-Encoding says so: "
            f"{error}"
        ) from None


def read_compute(body: bytes, limit: int) -> Compute:
    """Decodes a `ForwardBackwardRequest`, whose tensors take at most ``limit`` bytes."""
    message = pb.ForwardBackwardRequest()
    if len(body) > _COUNTED_BYTES:
        _check_parts(body, message.DESCRIPTOR)
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise DataError(
            "the body is not a ForwardBackwardRequest in protobuf; clients send it since version 0.25"
        ) from None
    if not message.model_id:
        raise DataError("model_id is missing; it names the model that create_model or load_weights answered")
    seq = number(message.seq_id, "seq_id")
    try:
        work = _pass(message, limit)
    except DataError as error:
        raise Numbered(message.model_id, seq, str(error)) from None
    return Compute(message.model_id, seq, work)


def _check_parts(body: bytes, kind: Descriptor) -> None:
    """Raises DataError for a message with too many fields. What is no protobuf is left to the parser."""
    stack, fields = [(0, len(body), kind)], 0
    with suppress(IndexError):
        while stack:
            at, end, kind = stack.pop()
            known = kind.fields_by_number
            while at < end:
                fields += 1
                tag, at = _varint(body, at)
                field, size = known.get(tag >> 3), _FIXED.get(tag & 7, 0)
                if tag & 7 == 0:
                    _, at = _varint(body, at)
                elif tag & 7 == 2:
                    size, at = _varint(body, at)
                    if field is not None and field.message_type is not None:
                        stack.append((at, at + size, field.message_type))
                    elif field is not None and field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_MESSAGE):
                        # Numbers, of a byte each at least.
                        fields += size
                elif not size:
                    return
                at += size
                if fields > _MOST_FIELDS:
                    raise DataError(f"the body has more than {_MOST_FIELDS} fields; send less at once")


# Bytes of the types of fields that are no varint and have no length.
_FIXED = {1: 8, 5: 4}


def _varint(body: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next part begins. Raises IndexError at the end of the body."""
    value, shift = 0, 0
    while (byte := body[at]) > 127:
        value |= (byte & 127) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 1


class Numbered(DataError):
    """A request that is refused although its model and number are known: the number is used up."""

    def __init__(self, model: str, seq: int, message: str) -> None:
        super().__init__(message)
        self.model = model
        self.seq = seq


def _pass(message: pb.ForwardBackwardRequest, limit: int) -> Pass:
    if message.loss_fn not in _LOSSES:
        instead = "; the client computes a custom loss itself" if message.loss_fn == "custom" else ""
        raise DataError(f"loss_fn={message.loss_fn!r} is none of {', '.join(_LOSSES)}{instead}")
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    if not message.data:
        raise DataError("data is empty: a pass needs at least one datum")
    if (count := len(message.data)) > _MOST_DATA:
        raise DataError(f"data has {count} entries, and one request may have {_MOST_DATA}; send several")
    fields = ("model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans")
    if (count := sum(len(getattr(datum, field)) for datum in message.data for field in fields)) > _MOST_PARTS:
        raise DataError(
            f"data has {count} chunks, inputs and spans, and one request may have {_MOST_PARTS}; send several"
        )
    data = []
    for index, datum in enumerate(message.data):
        where = f"data[{index}]"
        tokens = _tokens(datum.model_input, where)
        inputs: dict[str, NDArray[Any]] = {}
        if SEQUENCE in datum.loss_fn_inputs:
            raise DataError(f"{where}.loss_fn_inputs[{SEQUENCE!r}] is made of the datum's spans; leave it out")
        for name, tensor in datum.loss_fn_inputs.items():
            inputs[name] = array = _tensor(tensor, f"{where}.loss_fn_inputs[{name!r}]", limit)
            limit -= array.nbytes
        if datum.model_input_spans or datum.loss_fn_input_spans:
            targets = inputs.get("target_tokens")
            length = len(tokens) if targets is None else len(targets)
            _lengths(datum.model_input_spans, len(tokens), f"{where}.model_input_spans")
            inputs[SEQUENCE] = _sequences(datum.loss_fn_input_spans, length, f"{where}.loss_fn_input_spans")
        data.append(Datum(tokens, inputs))
    return Pass(message.loss_fn, config, data, backward=not message.forward_only)


def _tokens(chunks: Sequence[pb.Chunk], where: str) -> Ints:
    parts = []
    for index, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise _not_text(kind, f"{where}.model_input.chunks[{index}]")
        parts.append(_array(chunk.encoded_text.tokens, np.int32, f"{where}.model_input.chunks[{index}].tokens"))
    return np.concatenate(parts or [np.empty(0, np.int32)]).astype(np.int64)


def _not_text(kind: str | None, where: str) -> DataError:
    return DataError(f"{where} is of type {kind!r}; the service takes chunks of token ids only (encoded_text)")


def _array(data: bytes, dtype: type[np.generic], where: str) -> NDArray[Any]:
    if len(data) % np.dtype(dtype).itemsize:
        raise DataError(f"{where} has {len(data)} bytes, which are no whole number of {np.dtype(dtype)}")
    return np.frombuffer(data, dtype)


def _tensor(tensor: pb.Tensor, where: str, limit: int) -> NDArray[Any]:
    """A tensor of one or two dimensions, float32 or int64."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise DataError(f"{where} has dtype {tensor.dtype}; the service takes float32 and int64")
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        sparse = tensor.sparse_csr
        array = _dense(
            _array(sparse.values, dtype, where),
            _array(sparse.crow_indices, np.int64, f"{where}.crow_indices"),
            _array(sparse.col_indices, np.int64, f"{where}.col_indices"),
            shape,
            0,
            where,
            limit,
        )
    else:
        array = _array(tensor.dense, dtype, where)
        if shape:
            array = _shaped(array, shape, where)
    if array.ndim > 2:
        raise DataError(f"{where} has shape {list(shape)}; it has one or two dimensions")
    return array.astype(np.int64) if dtype is np.int32 else array


def _shaped(array: NDArray[Any], shape: Sequence[int], where: str) -> NDArray[Any]:
    if any(size < 0 for size in shape) or _product(shape) != array.size:
        raise DataError(f"{where} has {array.size} values, which do not fill its shape {list(shape)}")
    return array.reshape(tuple(shape))


def _product(shape: Sequence[int]) -> int:
    # In Python's integers: NumPy's would wrap around.
    product = 1
    for size in shape:
        product *= size
    return product


def _dense(
    values: NDArray[Any], rows: Ints, columns: Ints, shape: Sequence[int], empty: int, where: str, limit: int
) -> NDArray[Any]:
    """The dense form of a sparse matrix in CSR: row i has the values from ``rows[i]`` to ``rows[i + 1]``."""
    if len(shape) != 2 or min(shape) < 0:
        raise DataError(f"{where} is sparse with shape {list(shape)}; a sparse tensor has two dimensions")
    if (size := _product(shape) * values.itemsize) > limit:
        raise DataError(f"{where} is dense {size} bytes large, and {limit} are left for the request; send less at once")
    counts = np.diff(rows)
    sound = (
        len(rows) == shape[0] + 1
        and rows[0] == 0
        and rows[-1] == len(values) == len(columns)
        and not (counts < 0).any()
        and not ((columns < 0) | (columns >= shape[1])).any()
    )
    if not sound:
        raise DataError(f"{where} has row and column indices that do not fit its shape {list(shape)} and values")
    array = np.full(tuple(shape), empty, values.dtype)
    array[np.repeat(np.arange(shape[0]), counts), columns] = values
    return array


def _lengths(
    spans: Sequence[pb.ProvenanceSpan], total: int, where: str
) -> list[pb.SampledProvenanceSpan | pb.PromptProvenanceSpan]:
    """The arms of spans that cover ``total`` positions one after another."""
    arms: list[pb.SampledProvenanceSpan | pb.PromptProvenanceSpan] = []
    for index, span in enumerate(spans):
        kind = span.WhichOneof("span")
        arm = span.sampled_tokens if kind == "sampled_tokens" else span.prompt_tokens
        if kind is None or arm.length < 0 or arm.offset < 0 or not arm.sequence_id:
            raise DataError(f"{where}[{index}] names no sequence, or has a negative length or offset")
        arms.append(arm)
    if (covered := sum(arm.length for arm in arms)) != total:
        raise DataError(f"{where} covers {covered} positions of {total}; the spans must cover all of them")
    return arms


def _sequences(spans: Sequence[pb.ProvenanceSpan], total: int, where: str) -> Ints:
    """For each position the number of the sampled sequence that it is of, -1 for tokens of a prompt."""
    arms = _lengths(spans, total, where)
    numbers: dict[str, int] = {}
    sampled = [span.WhichOneof("span") == "sampled_tokens" for span in spans]
    marks = [
        numbers.setdefault(arm.sequence_id, len(numbers)) if own else -1 for arm, own in zip(arms, sampled, strict=True)
    ]
    return np.repeat(np.array(marks, np.int64), [arm.length for arm in arms])


def number(value: int | None, name: str) -> int:
    """A number of 64 bits from a client. Raises DataError for any other."""
    if value is None or not 0 <= value < 2**63:
        raise DataError(
            f"{name} is missing, negative or too large; it numbers what the client asks for, in the order of the client"
        )
    return value


def _seed(value: int) -> int:
    """Folds a seed as the protocol does, so that each has 63 bits."""
    return value % (2**63 - 1)


def read_json(body: bytes) -> dict[str, Any]:
    """Decodes a JSON object of at most `_MOST_VALUES` values."""
    if len(body) > _COUNTED_BYTES and sum(map(body.count, (b",", b"[", b"{"))) > _MOST_VALUES:
        raise DataError(f"the body has more than {_MOST_VALUES} values; send less at once")
    try:
        value = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError as error:
        raise DataError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"the body must be a JSON object, not a {type(value).__name__}")
    return value


def read(body: bytes, name: str) -> Any:
    """Decodes JSON into the client's message of this name. Raises DataError with the first field that does not fit."""
    return _read(body, getattr(types, name))


def _read(body: bytes, kind: type[Wire]) -> Wire:
    return _validated(read_json(body), kind)


def _validated(value: dict[str, Any], kind: type[Wire]) -> Wire:
    try:
        short = _shortened(value, [_MOST_OTHERS])
        # Whatever is wrong with one of many token ids is wrong with the first, because all are whole numbers.
        kind.model_validate(short)
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{kind.__name__}.{field}: {first['msg']}") from None
    except RecursionError:
        raise DataError("the body has lists or objects too deep in one another; send a flatter one") from None


def _shortened(value: Any, left: list[int]) -> Any:
    """A copy whose long lists of whole numbers have their first ones only.

    ``left`` says how many values may be beside them. Raises DataError for more.
    """
    if not isinstance(value, dict | list):
        return value
    if isinstance(value, list) and len(value) > _LONG_LIST and set(map(type, value)) == {int}:
        return value[:_LONG_LIST]
    left[0] -= len(value)
    if left[0] < 0:
        raise DataError(f"the body has more than {_MOST_OTHERS} values besides lists of token ids; send less at once")
    if isinstance(value, list):
        return [_shortened(each, left) for each in value]
    return {name: _shortened(each, left) for name, each in value.items()}


def read_create_model(body: bytes) -> CreateModel:
    """Decodes a `CreateModelRequest`. Without a seed, the adapters' is derived from session and number."""
    message = _read(body, types.CreateModelRequest)
    _require_adam(message.optimizer_config)
    lora = message.lora_config
    if lora is None:
        raise DataError("lora_config is missing: the service trains LoRA adapters, not whole models")
    if lora.rank < 1:
        raise DataError(f"lora_config.rank={lora.rank}; it is at least 1")
    if not (lora.train_attn or lora.train_mlp or lora.train_unembed):
        raise DataError("lora_config trains nothing; set train_attn, train_mlp or train_unembed")
    seq = number(message.model_seq_id, "model_seq_id")
    seed = zlib.crc32(f"{message.session_id}:{seq}".encode()) if lora.seed is None else _seed(lora.seed)
    spec = AdapterSpec(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
    return CreateModel(message.session_id, seq, message.base_model, spec, message.user_metadata)


def _require_adam(config: Any) -> None:
    if config is not None and config.type != "adamw":
        raise DataError(f"optimizer_config.type={config.type!r} is not supported; the service has adamw")


def read_optim_step(body: bytes) -> OptimStep:
    """Decodes an `OptimStepRequest`."""
    message = _read(body, types.OptimStepRequest)
    seq = number(message.seq_id, "seq_id")
    params = message.optim_params
    if not isinstance(params, types.AdamParams):
        raise Numbered(message.model_id, seq, f"optimizer {params.type!r} is not supported; send AdamParams")
    adam = Adam(
        params.learning_rate, params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm
    )
    return OptimStep(message.model_id, seq, adam)


def read_save_weights(body: bytes) -> SaveWeights:
    """Decodes a `SaveWeightsRequest`."""
    message = _read(body, types.SaveWeightsRequest)
    seq = number(message.seq_id, "seq_id")
    return SaveWeights(
        message.model_id, seq, message.path, message.overwrite, message.ttl_seconds, message.user_metadata
    )


def read_save_for_sampler(body: bytes) -> SaveForSampler:
    """Decodes a `SaveWeightsForSamplerRequest`."""
    message = _read(body, types.SaveWeightsForSamplerRequest)
    seq = number(message.seq_id, "seq_id")
    if (message.path is None) == (message.sampling_session_seq_id is None):
        raise Numbered(message.model_id, seq, "give either path or sampling_session_seq_id")
    if message.sampling_session_seq_id is not None:
        number(message.sampling_session_seq_id, "sampling_session_seq_id")
    return SaveForSampler(
        message.model_id,
        seq,
        message.path,
        inflight=message.kind == "inflight",
        sampler_seq=message.sampling_session_seq_id,
        ttl_seconds=message.ttl_seconds,
        metadata=message.user_metadata,
    )


def read_save_external(body: bytes) -> SaveForSampler:
    """Decodes a `SaveWeightsExternalRequest`."""
    message = _read(body, types.SaveWeightsExternalRequest)
    seq = number(message.seq_id, "seq_id")
    if message.age_encryption_recipients:
        raise Numbered(
            message.model_id, seq, "age_encryption_recipients is not supported: files are not encrypted; leave it out"
        )
    return SaveForSampler(message.model_id, seq, message.path, external=True, ttl_seconds=message.ttl_seconds)


def read_load_weights(body: bytes, base_model: str) -> LoadWeights:
    """Decodes a `LoadWeightsRequest`: of an existing model, or of a new one of a session."""
    message = _read(body, types.LoadWeightsRequest)
    existing = message.model_id is not None and message.seq_id is not None
    new = message.session_id is not None and message.model_seq_id is not None
    if existing == new:
        raise DataError("give either model_id and seq_id, or session_id and model_seq_id")
    number(message.seq_id if existing else message.model_seq_id, "seq_id" if existing else "model_seq_id")
    _require_adam(message.optimizer_config)
    if message.weights_access_token is not None:
        raise DataError("weights_access_token is not supported: a tenant loads checkpoints of its own")
    if message.base_model not in (None, base_model):
        raise DataError(f"base_model={message.base_model!r}; the service trains {base_model!r}")
    return LoadWeights(
        message.path,
        message.optimizer,
        message.model_id,
        message.seq_id,
        message.session_id,
        message.model_seq_id,
        message.user_metadata,
    )


def read_unload_model(body: bytes) -> UnloadModel:
    """Decodes an `UnloadModelRequest`."""
    return UnloadModel(_read(body, types.UnloadModelRequest).model_id)


def read_sample(body: bytes, limit: int) -> Sample:
    """Decodes a `SampleRequest`, whose dense tensors take at most ``limit`` bytes."""
    value = read_json(body)
    prompt = value.get("prompt")
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    for index, chunk in enumerate(chunks if isinstance(chunks, list) else []):
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else None
        if kind != "encoded_text":
            raise _not_text(kind, f"prompt.chunks[{index}]")
    message = _validated(value, types.SampleRequest)
    parts = [
        _ints(cast("types.EncodedTextChunk", chunk).tokens, f"prompt.chunks[{index}].tokens")
        for index, chunk in enumerate(message.prompt.chunks)
    ]
    tokens = np.concatenate(parts or [np.empty(0, np.int64)])
    if message.prompt_alt_tokens_k:
        raise DataError(f"prompt_alt_tokens_k={message.prompt_alt_tokens_k} is not supported; leave it 0")
    params = message.sampling_params
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    sampling = Sampling(
        prompt=tokens,
        samples=message.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=None if params.seed is None else _seed(params.seed),
        stop=cast("Sequence[str]", stop),
        stop_at_eos=params.stop is None or bool(stop),
        prompt_logprobs=_scored(message, len(tokens)),
        topk_prompt_logprobs=message.topk_prompt_logprobs,
        topk_sample_logprobs=message.topk_sample_logprobs,
        target_prompt_logprobs=_targets(message, limit),
    )
    sampler, seq = message.sampling_session_id, message.seq_id
    if sampler is not None:
        seq = number(seq, "seq_id")
    return Sample(sampling, sampler, seq, message.model_path, message.base_model)


def _ints(values: Sequence[float], where: str) -> Ints:
    array = np.array(values)
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind != "i":
        raise DataError(f"{where} has a value that is not a whole number of 64 bits")
    return array.astype(np.int64)


def _scored(message: types.SampleRequest, length: int) -> int:
    """The number of positions at the end of the prompt whose log-probs are returned."""
    last = message.prompt_logprobs_last_n
    if last is None:
        return length if message.prompt_logprobs else 0
    if not message.prompt_logprobs or not 1 <= last < length:
        raise DataError(
            f"prompt_logprobs_last_n={last} needs prompt_logprobs, and is between 1 and {length - 1} (the prompt "
            "without its first token)"
        )
    return last


def _targets(message: types.SampleRequest, limit: int) -> Ints | None:
    tensor = message.target_prompt_logprobs
    if tensor is None:
        return None
    where, shape = "target_prompt_logprobs", tensor.shape or []
    if tensor.dtype != "int64" or len(shape) != 2:
        raise DataError(f"{where} must be int64 of shape [prompt - 1, K], not {tensor.dtype} of {shape}")
    values = _ints(tensor.data, f"{where}.data")
    if tensor.sparse_crow_indices is None:
        return _shaped(values, shape, where)
    rows = _ints(tensor.sparse_crow_indices, f"{where}.sparse_crow_indices")
    columns = _ints(tensor.sparse_col_indices or (), f"{where}.sparse_col_indices")
    return _dense(values, rows, columns, shape, -1, where, limit)


# Outcomes


def numbers_of(outcome: PassResult | Samples) -> int:
    """How many numbers an outcome has at each of its positions, in sum."""
    if isinstance(outcome, PassResult):
        return sum(array.size for outputs in outcome.outputs for array in outputs.values())
    tops = [outcome.prompt_topk, *(sample.topk for sample in outcome.samples)]
    arrays = [top.ids for top in tops if top is not None] + [sample.ids for sample in outcome.samples]
    return sum(array.size for array in (*arrays, outcome.prompt_logprobs, outcome.target_logprobs) if array is not None)


def write_protobuf(outcome: PassResult | Samples) -> bytes:
    """Encodes what clients read as protobuf: a `ForwardBackwardOutput` or a `SampleResponse`."""
    message = _pass_output(outcome) if isinstance(outcome, PassResult) else _sample_response(outcome)
    return message.SerializeToString()


def _pass_output(result: PassResult) -> pb.ForwardBackwardOutput:
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=dict(result.metrics))
    # One record has arrays of one width each, so a change of width begins a new one.
    record: list[Mapping[str, Floats]] = []
    width: object = None
    for outputs in result.outputs:
        own = {name: array.shape[1:] for name, array in outputs.items()}
        if record and own != width:
            _add_record(message, record)
            record = []
        width = own
        record.append(outputs)
    if record:
        _add_record(message, record)
    return message


def _add_record(message: pb.ForwardBackwardOutput, record: Sequence[Mapping[str, Floats]]) -> None:
    added = message.loss_fn_outputs.add(num_datums=len(record))
    for name, first in record[0].items():
        arrays = [np.ascontiguousarray(outputs[name], np.float32) for outputs in record]
        field = added.fields[name]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(first.shape[1:])


def _sample_response(samples: Samples) -> pb.SampleResponse:
    message = pb.SampleResponse(prompt_cache_hit_tokens=samples.cached_prompt_tokens)
    for sample in samples.samples:
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if sample.stopped else pb.STOP_REASON_LENGTH,
            tokens=sample.ids.astype(np.int32).tobytes(),
            logprobs=sample.logprobs.astype(np.float32).tobytes(),
        )
        if sample.topk is not None:
            _write_top(sequence.topk_sampled_logprobs, sample.topk)
    if samples.prompt_logprobs is not None:
        message.prompt_logprobs = samples.prompt_logprobs.astype(np.float32).tobytes()
    if samples.prompt_topk is not None:
        _write_top(message.topk_prompt_logprobs, samples.prompt_topk)
    if samples.target_logprobs is not None:
        tensor = message.target_prompt_logprobs
        tensor.dtype = pb.DTYPE_FLOAT32
        tensor.shape.extend(samples.target_logprobs.shape)
        tensor.dense = np.nan_to_num(samples.target_logprobs.astype(np.float32), nan=0.0).tobytes()
    return message


def _filled(top: TopLogprobs) -> tuple[NDArray[np.int32], Floats]:
    empty = np.isnan(top.logprobs)
    ids = np.where(empty, 0, top.ids).astype(np.int32)
    return ids, np.where(empty, _NO_LOGPROB, top.logprobs).astype(np.float32)


def _write_top(message: pb.TopkLogprobs, top: TopLogprobs) -> None:
    ids, logprobs = _filled(top)
    message.length, message.k = ids.shape
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()


def write_json(outcome: Outcome) -> bytes:
    """Encodes any outcome as JSON, with `weight_versions` beside samples; a number that is not finite is null."""
    return orjson.dumps(_json(outcome), option=orjson.OPT_SERIALIZE_NUMPY)


def _json(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case ModelReady():
            return _present(model_id=outcome.model, path=outcome.path)
        case Updated():
            # JSON has no NaN, and the client reads this text as one.
            metrics = {name: value if np.isfinite(value) else str(value) for name, value in outcome.metrics.items()}
            return {"type": "optim_step", "metrics": metrics}
        case Saved():
            return _present(path=outcome.path, sampling_session_id=outcome.sampler)
        case Failed():
            # Tenants are not told where the servers are; the log is.
            return {"error": _ADDRESS.sub("a server", outcome.message), "category": outcome.category}
        case PassResult():
            return {
                "loss_fn_output_type": "ArrayRecord",
                "loss_fn_outputs": [
                    {name: _tensor_json(array) for name, array in outputs.items()} for outputs in outcome.outputs
                ],
                "metrics": dict(outcome.metrics),
            }
        case Samples():
            return _present(
                type="sample",
                sequences=[_sequence_json(sample) for sample in outcome.samples],
                prompt_logprobs=outcome.prompt_logprobs,
                topk_prompt_logprobs=_top_json(outcome.prompt_topk),
                target_prompt_logprobs=_tensor_json(outcome.target_logprobs),
                prompt_cache_hit_tokens=outcome.cached_prompt_tokens,
                weight_versions=weight_versions(outcome),
            )


def _present(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _tensor_json(array: Floats | None) -> dict[str, Any] | None:
    if array is None:
        return None
    return {"data": np.ascontiguousarray(array, np.float32).ravel(), "dtype": "float32", "shape": list(array.shape)}


def _sequence_json(sample: SampledTokens) -> dict[str, Any]:
    return _present(
        stop_reason="stop" if sample.stopped else "length",
        tokens=np.ascontiguousarray(sample.ids, np.int64),
        logprobs=np.ascontiguousarray(sample.logprobs, np.float32),
        topk_logprobs=_top_json(sample.topk),
    )


def _top_json(top: TopLogprobs | None) -> dict[str, Any] | None:
    if top is None:
        return None
    ids, logprobs = _filled(top)
    return {"token_ids": ids, "logprobs": logprobs}


def weight_versions(samples: Samples) -> list[list[tuple[str, int, int]]]:
    """For each sample its runs of tokens: name of the adapters ("" for the base model), first token, end."""
    return [[(name, int(first), int(end)) for name, first, end in sample.versions] for sample in samples.samples]
