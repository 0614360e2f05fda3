"""The whole example: prepare the data where there is none, start the services, train the agent, show what came of it.

    python -m deepresearch.run [key=value ...] [--config FILE] [--data DIR] [--refiners N] ...

Run it by `bash examples/deepresearch/run.sh`, which sets the path and passes everything on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import megasync
from deepresearch.agent import Rules, SearchAgent
from deepresearch.clients import RefineClient, RetrieveClient
from deepresearch.documents import lines
from deepresearch.folders import DataFolder
from deepresearch.prepare import prepare
from deepresearch.report import results_table
from deepresearch.services import running_services
from megasync.errors import MegasyncError

CONFIG = Path(__file__).with_name("deepresearch.yaml")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in lines(path)]


async def train(options: argparse.Namespace, data: DataFolder) -> None:
    async with running_services(data, options.data / "logs", options.refiners) as urls:
        retriever = RetrieveClient(urls.retrievers)
        refiner = RefineClient(urls.refiners) if urls.refiners else None
        agent = SearchAgent(retriever, refiner, Rules(options.max_turns, options.top_k, options.may_open))
        try:
            result = await megasync.AsyncTrainer(
                options.config,
                options.overrides,
                rollout=agent.rollout,
                train_dataset=rows(data.train),
                eval_dataset=rows(data.held_out),
            ).run()
            print(results_table(result.run_dir))
            print(f"searches shown unrefined: {agent.unrefined}; the retriever: {json.dumps(await retriever.stats())}")
        finally:
            await retriever.close()
            if refiner is not None:
                await refiner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the configuration")
    parser.add_argument("--config", default=CONFIG, type=Path)
    parser.add_argument(
        "--data", type=Path, default=Path("runs/deepresearch-data"), help="what prepare.py made; made if missing"
    )
    parser.add_argument("--refiners", type=int, default=2, help="refine servers; 0 shows the passages themselves")
    parser.add_argument("--max-turns", type=int, default=3, help="answers of the model in one sample")
    parser.add_argument("--top-k", type=int, default=2, help="passages that a search finds")
    parser.add_argument("--may-open", action="store_true", help="a second tool that shows whole documents")
    options = parser.parse_intermixed_args()
    data = DataFolder(options.data)

    if not data.root.exists():
        from deepresearch.embedder import Embedder

        prepare(data, Embedder())
    try:
        asyncio.run(train(options, data))
    except MegasyncError as error:
        parser.exit(1, f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
