"""An agent outside of a run: it claims samples over HTTP, plays them with OpenAI's client, and sends the rewards.

    python examples/external_agent/agent.py RUN/sessions     # the folder with the run's addresses and its key

It imports nothing of megasync. Start as many as you like, on any machine; kill one, and others play its samples.
"""

import asyncio
import sys
from pathlib import Path

import httpx
from openai import APIError, AsyncOpenAI

# Samples that are played at once, of each address.
AT_ONCE = 64


async def play(model: AsyncOpenAI, session: dict) -> float:
    """The share of right positions in the answer to a digit task, with its end as one of them."""
    prompt = session["sample"]["prompt"]
    reply = await model.chat.completions.create(model=session["model"], messages=[{"role": "user", "content": prompt}])
    text, answer = reply.choices[0].message.content or "", session["sample"]["answer"]
    ended = reply.choices[0].finish_reason == "stop" and len(text) == len(answer)
    return (sum(map(str.__eq__, text, answer)) + ended) / (len(answer) + 1)


def address(file: Path) -> str:
    return f"{file.read_text()}/sessions"  # of a rollout worker; one that replaces another may have another address


async def work(file: Path, http: httpx.AsyncClient, model: AsyncOpenAI) -> None:
    while True:
        try:
            run = address(file)
            claim = await http.post(run, json={"wait": 30})
            if claim.status_code == 204:  # there is no sample now
                continue
            session = claim.raise_for_status().json()
            try:
                own = model.with_options(base_url=session["base_url"], api_key=session["api_key"])
                reward = await play(own, session)
            except APIError as error:
                print(f"giving a sample back: {error}", flush=True)
                await http.delete(f"{run}/{session['id']}")
            else:  # it is refused if the run has given the sample to others meanwhile
                await http.post(f"{run}/{session['id']}/reward", json={"reward": reward})
        except httpx.TransportError:  # the run is down, or a worker of it
            await asyncio.sleep(1)


async def main(key: str, files: list[Path]) -> None:
    options = {"timeout": 600, "limits": httpx.Limits(max_connections=None)}
    http = httpx.AsyncClient(headers={"Authorization": f"Bearer {key}"}, **options)
    model = AsyncOpenAI(api_key="its own", base_url="http://its.own", http_client=httpx.AsyncClient(**options))
    await asyncio.gather(*(work(file, http, model) for file in files for _ in range(AT_ONCE)))


folder = Path(sys.argv[1])
asyncio.run(main((folder / "key").read_text(), [*folder.glob("*.url")]))
