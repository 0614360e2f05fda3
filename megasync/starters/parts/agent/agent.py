"""An agent written for OpenAI's API, without a word of megasync: it guesses a number, and is told higher or lower.

OPENAI_API_KEY=... python agent.py      # it plays against any model with such an API
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

from openai import AsyncOpenAI

GUESSES = 4
RULES = "I think of a number from 1 to 9. Answer with one guess, a number alone. I say higher, lower or right."


async def agent(base_url: str, api_key: str, sample: dict, model: str) -> dict:
    """Plays one game about the row `sample`. Returns the reward, and a metric beside it."""
    messages: list[Any] = [{"role": "user", "content": f"{RULES} {sample['prompt']}"}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for guesses in range(1, GUESSES + 1):
            completion = await client.chat.completions.create(model=model, messages=messages)
            answer = completion.choices[0].message
            found = re.search(r"\d+", answer.content or "")
            number = int(found[0]) if found else None
            if number == sample["number"]:
                return {"reward": reward(guesses), "guesses": guesses}
            messages += [
                answer.model_dump(exclude_none=True),
                {"role": "user", "content": hint(number, sample["number"])},
            ]
    return {"reward": 0.0, "guesses": GUESSES}


def reward(guesses: int) -> float:
    """1 for a first guess that is right, and less for each further one."""
    return 1 - (guesses - 1) / GUESSES


def hint(guess: int | None, number: int) -> str:
    if guess is None:
        return "That is no number."
    return "higher" if guess < number else "lower"


async def play_once() -> None:
    url = os.environ.get("OPENAI_BASE_URL", "https://api.openai.com/v1")
    sample = {"prompt": "Begin.", "number": 7}
    print(await agent(url, os.environ["OPENAI_API_KEY"], sample, os.environ.get("OPENAI_MODEL", "gpt-4o-mini")))


if __name__ == "__main__":
    asyncio.run(play_once())
