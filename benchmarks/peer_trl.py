"""TRL's side of `peers.py`, in its own environment: `peer_trl.py CONFIG STEPS OUT [KEY=VALUE ...]`.

Trains with `GRPOTrainer` and writes the seconds of each step and the held-out scores to the JSON file OUT.
"""

# Its environment has TRL; see `peers.py`.
# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from megasync.app.workload import PythonArguments, Workload, prepare_workload
from megasync.config import Config, load_config
from megasync.rewards import RewardRunner
from megasync.trajectory import Prompt, Trajectory

# Sequences in one forward and backward pass.
MICROBATCH = 32


class Scores:
    """Rewards of texts by the configuration's functions."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop

    def of(self, rewards: RewardRunner, texts: Sequence[str], prompt: Prompt) -> list[float]:
        answers = [Trajectory(prompt.prompt_ids, [0], [1], [0.0], [0], text=self._until_stop(text)) for text in texts]
        return [t.reward or 0.0 for t in asyncio.run(rewards.score(answers, prompt.columns, prompt.uid))]

    def _until_stop(self, text: str) -> str:
        for stop in self._stop:
            text = text.partition(stop)[0]
        return text


class Clock(TrainerCallback):
    """Times the steps and evaluates between them."""

    def __init__(self, config: Config, work: Workload, scores: Scores) -> None:
        self._config, self._work, self._scores = config, work, scores
        self.steps: list[float] = []
        self.scores: dict[int, float] = {}
        self._start = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self._evaluate(parts["model"], 0)
        self._start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.steps.append(time.monotonic() - self._start)
        print(f"step {state.global_step}: {self.steps[-1]:.1f} s", flush=True)
        every = self._config.eval.every_steps
        if every and state.global_step % every == 0:
            self._evaluate(parts["model"], state.global_step)
        self._start = time.monotonic()

    @torch.no_grad()
    def _evaluate(self, model: Any, step: int) -> None:
        (held_out,) = self._work.eval_sets
        tokenizer, found = self._work.tokenizer, []
        model.eval()
        for start in range(0, len(held_out.prompts), MICROBATCH):
            prompts = held_out.prompts[start : start + MICROBATCH]
            texts = [tokenizer.decode(prompt.prompt_ids) for prompt in prompts]
            batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
            with torch.autocast("cpu", torch.bfloat16):
                ids = model.generate(
                    **batch, do_sample=False, max_new_tokens=self._config.rollout.sampling.max_new_tokens
                )
            answers = tokenizer.batch_decode(ids[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            for prompt, answer in zip(prompts, answers, strict=True):
                found += self._scores.of(held_out.rewards, [answer], prompt)
        model.train()
        self.scores[step] = sum(found) / len(found)
        print(f"held-out score {self.scores[step]:.3f} after step {step}", flush=True)


def main() -> None:
    path, steps, out, *overrides = sys.argv[1:]
    config = load_config(path, overrides)
    work = prepare_workload(config, PythonArguments())
    schedule, sampling, optimizer = config.schedule, config.rollout.sampling, config.trainer.optimizer
    prompts = [work.source.next() for _ in range(int(steps) * schedule.groups_per_step)]
    by_uid = {prompt.uid: prompt for prompt in prompts}
    tokenizer, scores = work.tokenizer, Scores(sampling.stop)
    rows = [{"prompt": tokenizer.decode(prompt.prompt_ids), "uid": prompt.uid} for prompt in prompts]
    if sampling.stop:
        # TRL ends a response at one token only: the one of the stop text.
        (tokenizer.eos_token_id,) = tokenizer.encode(sampling.stop[0], add_special_tokens=False)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    model.generation_config.eos_token_id = tokenizer.eos_token_id

    def reward(completions: list[str], uid: list[str], **columns: Any) -> list[float]:
        return [scores.of(work.rewards, [text], by_uid[of])[0] for text, of in zip(completions, uid, strict=True)]

    answers = schedule.groups_per_step * schedule.samples_per_group
    clock = Clock(config, work, scores)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            max_steps=int(steps),
            per_device_train_batch_size=MICROBATCH,
            gradient_accumulation_steps=answers // MICROBATCH,
            num_generations=schedule.samples_per_group,
            max_completion_length=sampling.max_new_tokens,
            temperature=sampling.temperature,
            learning_rate=optimizer.lr,
            lr_scheduler_type="constant",
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            max_grad_norm=optimizer.clip_grad,
            weight_decay=optimizer.weight_decay,
            beta=config.algorithm.kl_coef,
            shuffle_dataset=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            seed=config.seed,
        )
        trainer = GRPOTrainer(
            model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.train()
    Path(out).write_text(json.dumps({"steps": clock.steps, "scores": clock.scores}))


if __name__ == "__main__":
    main()
