"""A process with a service and its client: repeats all requests of a script and prints each outcome as a line.

python service_process.py FOLDER
"""

import asyncio
import itertools
import json
import sys
from pathlib import Path

from service_fakes import SERVED, FakeServers, FakeTrainer, compute, create, save, snapshot, step

from megasync.service.requests import Request
from megasync.service.service import Service

STEPS = 12


def requests_of(session: str) -> list[Request]:
    model = f"{session}:train:0"
    made: list[Request] = [create(session)]
    seq = itertools.count(1)
    for number in range(STEPS):
        made += [compute(model, next(seq), number, 1), compute(model, next(seq), number, 2), step(model, next(seq))]
        made.append(save(model, next(seq), "kept", overwrite=True))
        made.append(snapshot(model, next(seq), sampler=number))
    return made


async def main(folder: Path) -> None:
    async with Service(folder, FakeTrainer(), FakeServers(), SERVED) as service:
        session = await service.create_session("a", key="only")
        requests = requests_of(session)
        promises = [await service.submit("a", requests[0])]
        promises += await asyncio.gather(*(service.submit("a", request) for request in requests[1:]))
        for number, promise in enumerate(promises):
            outcome = await service.outcome("a", promise, 60)
            text = str(outcome).replace(session, "SESSION")
            print(json.dumps([number, text]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
