"""The recipe of `serve.py`, on the calls that Tinker's clients of all versions have: `serve_recipe.py JSON`.

Each tenant is a thread with a client and a model of its own. A step samples a group of responses for each prompt, and
trains on them: the reward of a response is the share of its token ids that are even, so a server that trains shows it.
Prompts are random tokens and no token ends a response, so each step has the same number of tokens on each server. A
line of JSON is printed for each finished step.
"""

# Its environment has a client; see `serve.py`.
# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tinker
from tinker import types


def result(answer: Any) -> Any:
    """The value of a future; older clients return some values without one."""
    return answer.result() if hasattr(answer, "result") else answer


class Tenant:
    """A client that trains one model."""

    def __init__(self, given: dict[str, Any], number: int) -> None:
        self._given, self._number = given, number
        self._draw = random.Random(number)
        service = tinker.ServiceClient(base_url=given["url"], api_key=given["keys"][number])
        # Tied embeddings have no adapters on the peer's side.
        self._model = result(
            service.create_lora_training_client(given["model"], rank=given["rank"], seed=number, train_unembed=False)
        )

    def step(self, step: int) -> None:
        given, clock = self._given, [time.monotonic()]
        sampler = result(self._model.save_weights_and_get_sampling_client())
        clock.append(time.monotonic())
        size = range(given["prompt"])
        prompts = [[self._draw.randrange(given["vocabulary"]) for _ in size] for _ in range(given["prompts"])]
        wanted = types.SamplingParams(max_tokens=given["response"], temperature=1.0, stop=given["stop"])
        asked = [
            sampler.sample(types.ModelInput.from_ints(ids), num_samples=given["samples"], sampling_params=wanted)
            for ids in prompts
        ]
        groups = [[(s.tokens, s.logprobs) for s in future.result().sequences] for future in asked]
        clock.append(time.monotonic())
        data, rewards = [], []
        for ids, group in zip(prompts, groups, strict=True):
            scores = [sum(token % 2 == 0 for token in out) / len(out) for out, _ in group]
            rewards += scores
            mean = sum(scores) / len(scores)
            data += [
                datum(ids, list(out), list(logprobs), score - mean)
                for (out, logprobs), score in zip(group, scores, strict=True)
            ]
        clock.append(time.monotonic())
        # Both at once, as a client does that does not wait for the network between them.
        passed = self._model.forward_backward(data, "importance_sampling")
        updated = self._model.optim_step(types.AdamParams(learning_rate=given["lr"]))
        passed.result()
        clock.append(time.monotonic())
        updated.result()
        clock.append(time.monotonic())
        save, sample, _, train, update = (end - start for start, end in itertools.pairwise(clock))
        row = {
            "tenant": self._number,
            "step": step,
            "start": clock[0],
            "end": clock[-1],
            "save": save,
            "sample": sample,
            "train": train,
            "update": update,
            "sampled": sum(len(out) for group in groups for out, _ in group),
            "trained": sum(one.model_input.length for one in data),
            "reward": sum(rewards) / len(rewards),
        }
        # One write, so that lines of threads do not mix.
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def datum(prompt: list[int], out: list[int], logprobs: list[float], advantage: float) -> types.Datum:
    """A response with what the loss reads; the positions of its prompt have neither log-prob nor advantage."""
    ids, before = prompt + out, [0.0] * (len(prompt) - 1)
    # Any: the client turns arrays into its own type.
    inputs: dict[str, Any] = {
        "target_tokens": np.array(ids[1:], dtype=np.int64),
        "logprobs": np.array(before + logprobs, dtype=np.float32),
        "advantages": np.array(before + [advantage] * len(out), dtype=np.float32),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def main() -> None:
    given = json.loads(sys.argv[1])
    tenants = [Tenant(given, number) for number in range(len(given["keys"]))]

    def run(tenant: Tenant) -> None:
        for step in range(given["steps"]):
            tenant.step(step)

    with ThreadPoolExecutor(len(tenants)) as pool:
        list(pool.map(run, tenants))


if __name__ == "__main__":
    main()
