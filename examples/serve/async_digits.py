"""Asynchronous reinforcement learning on Tinker's client: a model learns to add one to each digit of its prompt.

    megasync serve configs/serve_quickstart.yaml     # prints the variables that the client reads
    python examples/serve/async_digits.py            # in an environment with the package tinker

`IN_FLIGHT` groups are sampled all the time, with the newest weights, and each step trains on those that are finished.
"""

import asyncio
import os
import random
from typing import Any

import numpy as np
import tinker

MODEL, STEPS = os.environ.get("MODEL", "models/digits"), int(os.environ.get("STEPS", "150"))
GROUPS, IN_FLIGHT, SAMPLES, DIGITS, END = 16, 32, 16, 4, 15
ADAM = tinker.AdamParams(learning_rate=3e-3)


async def sample_group(sampler: tinker.SamplingClient) -> tuple[list[tinker.Datum], float]:
    """Samples a prompt; the reward is the share of right positions, the advantage its distance from the mean."""
    digits = [random.randrange(10) for _ in range(DIGITS)]
    prompt, answer = [12, *digits, 10], [*((digit + 1) % 10 for digit in digits), END]
    params = tinker.SamplingParams(max_tokens=len(answer), temperature=1.0)
    reply = await sampler.sample_async(tinker.ModelInput.from_ints(prompt), SAMPLES, params)
    rewards = np.array([sum(map(int.__eq__, each.tokens, answer)) for each in reply.sequences]) / len(answer)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    data = [datum(prompt, *pair) for pair in zip(reply.sequences, advantages.tolist(), strict=True)]
    return data, float(rewards.mean())


def datum(prompt: list[int], sample: tinker.SampledSequence, advantage: float) -> tinker.Datum:
    """Puts a sample behind its prompt, of which nothing is trained; position i predicts token i + 1."""
    tokens, untrained = [*prompt, *sample.tokens], [0.0] * (len(prompt) - 1)
    values = {"logprobs": sample.logprobs, "advantages": [advantage] * len(sample.tokens)}
    inputs: Any = {"target_tokens": tokens[1:]} | {name: [*untrained, *each] for name, each in values.items()}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


async def main() -> None:
    training = await tinker.ServiceClient().create_lora_training_client_async(base_model=MODEL, rank=32, seed=0)
    sampler = await training.save_weights_and_get_sampling_client_async(kind="inflight")
    running = {asyncio.create_task(sample_group(sampler)) for _ in range(IN_FLIGHT)}
    for step in range(1, STEPS + 1):
        groups = []
        while len(groups) < GROUPS:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            groups += [task.result() for task in done]
            running |= {asyncio.create_task(sample_group(sampler)) for _ in done}
        data = [each for group, _ in groups for each in group]
        passed = await training.forward_backward_async(data, "importance_sampling")
        stepped = await training.optim_step_async(ADAM)
        await asyncio.gather(passed, stepped)
        await training.save_weights_and_get_sampling_client_async(kind="inflight")
        print(f"step {step}  reward {np.mean([reward for _, reward in groups]):.3f}", flush=True)


asyncio.run(main())
