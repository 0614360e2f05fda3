"""The whole example: prepare what is missing, start the retriever, train the agent, show what it did.

    python -m deepresearch.run [key=value ...] [--config FILE] [--data DIR]

Run it by `bash examples/deepresearch/run.sh`, which sets the path and passes everything on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path

import megasync
from deepresearch.folders import DataFolder
from deepresearch.prepare import prepare
from deepresearch.report import results_table
from deepresearch.retrieve_client import RetrieveClient
from deepresearch.services import running_retriever
from megasync.errors import MegasyncError

CONFIG = Path(__file__).with_name("deepresearch.yaml")
# Where the configuration expects the small models.
MODELS = Path("models/deepresearch")


def supplied(data: DataFolder, retriever: str) -> list[str]:
    """The keys of the configuration that depend on where the data is, and on the retriever's URL."""
    return [
        f"data.train={{kind: jsonl, source: {data.train}}}",
        f"data.eval={{kind: jsonl, source: {data.held_out}}}",
        f"rollout.workflow_options.retrievers=[{retriever}]",
    ]


async def train(options: argparse.Namespace, data: DataFolder) -> None:
    async with running_retriever(data, data.root / "logs") as url:
        given = supplied(data, url)
        if options.resume is not None:
            trainer = megasync.AsyncTrainer.resume(options.resume, [*given, *options.overrides])
        else:
            trainer = megasync.AsyncTrainer(options.config, [*given, *options.overrides])
        result = await trainer.run()
        print(results_table(result.run_dir))
        client = RetrieveClient([url])
        try:
            print(f"the retriever: {json.dumps(await client.stats())}")
        finally:
            await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the configuration")
    parser.add_argument("--config", default=CONFIG, type=Path)
    parser.add_argument("--data", type=Path, default=Path("runs/deepresearch-data"), help="prepared if it is missing")
    parser.add_argument("--resume", type=Path, metavar="RUN", help="continue this run instead of starting one")
    options = parser.parse_intermixed_args()
    data = DataFolder(options.data)

    if not data.root.exists():
        prepare(data)
    if options.config == CONFIG and not MODELS.exists():
        from deepresearch.small_models import make

        make(MODELS)
    try:
        asyncio.run(train(options, data))
    except MegasyncError as error:
        parser.exit(1, f"{type(error).__name__}: {error}\n")


if __name__ == "__main__":
    main()
