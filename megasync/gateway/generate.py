"""The token-level route `POST /inference/v1/generate`: ids of the prompt in; sampled ids, log-probs and versions out.

Trainers that render chat templates themselves use it. A prompt that begins with all tokens of an earlier request of the
session, its prompt and its response, continues that trajectory.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import msgspec

from megasync.concurrency.first_use import prepared
from megasync.gateway.request import (
    PENALTY,
    Count,
    Neutral,
    Sampling,
    Seed,
    Strict,
    TopK,
    check_neutral,
    chosen,
    decode_body,
    stops,
)
from megasync.rollout.conversation import Generation

# Ids of 32 bits; the client refuses those outside the vocabulary.
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


@prepared
class SamplingParams(Strict):
    """The sampling parameters of a request, under their names in vLLM."""

    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    seed: Seed | None = None
    # Accepted only with values that change nothing; see _NEUTRAL.
    n: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    logit_bias: Any = None
    bad_words: Any = None
    # How a text would be shown, and routes that are not returned: ignored.
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    include_stop_str_in_output: Any = None
    detokenize: Any = None
    output_kind: Any = None
    routed_experts_prompt_start: Any = None


@prepared
class GenerateBody(Strict):
    """A request of the token-level route. Unknown fields are refused."""

    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    model: str = ""
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    # Accepted only with values that change nothing; see _NEUTRAL.
    stream: Any = None
    features: Any = None
    content_parts: Any = None
    # Scheduling, caching and identity: ignored.
    cache_salt: Any = None
    priority: Any = None
    request_id: Any = None
    return_token_ids: Any = None


_NEUTRAL: Neutral = {
    "stream": ((False,), "an answer is returned whole"),
    "features": (({},), "only text is supported"),
    "content_parts": (([],), "only text is supported"),
}
_NEUTRAL_SAMPLING: Neutral = {
    "n": ((1,), "each request returns one answer; send several requests"),
    "logprobs": ((0, 1), "only the sampled tokens' log-probs are kept"),
    "prompt_logprobs": ((), "only the sampled tokens' log-probs are kept"),
    "presence_penalty": ((0,), PENALTY),
    "frequency_penalty": ((0,), PENALTY),
    "repetition_penalty": ((1,), PENALTY),
    "min_tokens": ((0,), "the trainer does not model a minimum length"),
    "ignore_eos": ((False,), "an answer ends where the model ends it"),
    "logit_bias": (({},), "the trainer does not model biases"),
    "bad_words": (([],), "the trainer does not model biases"),
}


def parse_generate(raw: bytes) -> tuple[list[int], Sampling]:
    """The ids of the prompt and the sampling options of a request. Raises RequestError (400)."""
    body = decode_body(raw, GenerateBody)
    check_neutral(body, _NEUTRAL)
    params = body.sampling_params
    check_neutral(params, _NEUTRAL_SAMPLING, "sampling_params.")
    # vLLM's other name for all tokens.
    top_k = -1 if params.top_k == 0 else params.top_k
    return body.token_ids, Sampling(
        max_new_tokens=params.max_tokens,
        stop=stops(params.stop, "sampling_params.stop"),
        stop_token_ids=params.stop_token_ids or (),
        chosen=chosen(
            temperature=params.temperature, top_p=params.top_p, top_k=top_k, min_p=params.min_p, seed=params.seed
        ),
    )


def generated(generation: Generation) -> dict[str, Any]:
    """The answer: ids, and for each of them its log-prob and the weight version that sampled it."""
    ids, prompt = generation.token_ids, len(generation.prompt)
    return {
        "request_id": f"generate-{secrets.token_hex(12)}",
        "choices": [
            {
                "index": 0,
                "token_ids": ids,
                "logprobs": {
                    "content": [
                        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
                        for token, logprob in zip(ids, generation.logprobs, strict=True)
                    ]
                },
                "weight_versions": generation.versions,
                "finish_reason": generation.finish_reason,
            }
        ],
        "usage": {"prompt_tokens": prompt, "completion_tokens": len(ids), "total_tokens": prompt + len(ids)},
    }
