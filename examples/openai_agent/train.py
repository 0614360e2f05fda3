"""SmolLM2 learns to play that agent's game: `python examples/openai_agent/train.py [key=value ...]`, on a CPU."""

from __future__ import annotations

import sys
from pathlib import Path

from agent import agent

import megasync

OPENINGS = ("Begin.", "Your first guess?", "Guess!", "What is it?")


def rows() -> list[dict]:
    return [{"prompt": opening, "number": number} for opening in OPENINGS for number in range(1, 10)]


if __name__ == "__main__":
    config = Path(__file__).parent / "openai_agent.yaml"
    megasync.AsyncTrainer(config, sys.argv[1:], agent=agent, train_dataset=rows(), eval_dataset=rows()[::4]).train()
