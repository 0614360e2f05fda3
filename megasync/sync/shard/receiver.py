"""The serving rank's side of a shard-to-shard sync: stage a version while generating, then commit it by local copy.

A `Receiver` lives in every tensor-parallel rank of an engine, inside the engine's own process, and knows the engine only
as a dictionary of parameters. Staging runs in a thread: parcels land in an arena beside the live weights, and each is
checked against the digest that its sender took. Nothing of a staged version is seen until `commit` copies it.

Without room for an arena, `commit` itself receives, parcel by parcel; the engine then stands still meanwhile, and a
failure leaves it with parts of two versions.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from typing import Any

import torch

from megasync.device import side_stream, synchronize
from megasync.errors import SyncError
from megasync.layout.digest import MASK, combine, digest, signed
from megasync.sync.disk import delta
from megasync.sync.groups import Deadline, Links, join_store
from megasync.sync.shard.inbound import CONFIRMED, DELTA, FULL, TABLE, Header, Inbound, Place, Program

log = logging.getLogger(__name__)


@dataclass
class Stage:
    """One version on its way into the arena. ``state`` is running, staged or failed."""

    attempt: str
    state: str = "running"
    error: str = ""
    digests: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    received: int = 0

    def report(self) -> dict[str, Any]:
        return {
            "attempt": self.attempt,
            "state": self.state,
            "error": self.error,
            "digest": combine(self.digests),
            "seconds": self.seconds,
            "bytes": self.received,
        }


class Receiver:
    """Answers the driver's commands on one serving rank. The constructor allocates and opens nothing.

    Args:
        tp: this rank's tensor-parallel index.
        params: asked for the live parameters and buffers, by the names of the trace; an engine may replace them.
    """

    def __init__(self, tp: int, params: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._tp = tp
        self._params = params
        # Messages arrive where the weights are.
        self._wire = next(iter(params().values())).device
        self._program: Program | None = None
        self._arena: torch.Tensor | None = None
        self._links: Links | None = None
        self._link_name = ""
        self._stage: Stage | None = None
        # The attempt whose weights the arena holds whole; deltas build on it.
        self._base = ""
        # Of each parameter that the program names: shape, strides and dtype when it was traced.
        self._forms: dict[str, tuple] = {}
        # Where the parameters were, and the copies that a commit consists of.
        self._pairs: tuple[list[int], list[torch.Tensor], list[torch.Tensor]] | None = None

    def handle(self, command: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one command; returns at once.

        Raises:
            SyncError: an unknown command, or one that does not fit the present state.
        """
        commands = {"program": self._take_program, "stage": self._begin, "poll": self._poll, "drop": self._drop}
        if command not in commands:
            raise SyncError(f"unknown command {command!r}; known are {', '.join(commands)}")
        return commands[command](given)

    def _take_program(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Keeps the program for later versions and decides, by ``arena_bytes`` (null: no limit), whether it stages."""
        self._check_idle()
        program = Program(given, self._tp)
        limit = given["arena_bytes"]
        stages = limit is None or program.nbytes <= limit
        if self._program is None or self._program.digest != program.digest:
            self._arena, self._pairs, self._base = None, None, ""
        self._program = program
        self._forms = self._present_forms(program)
        where = torch.device("cpu") if given["arena"] == "host" else self._wire
        if not stages:
            # The cached copies read from the arena, so they go with it.
            self._arena, self._pairs, self._base = None, None, ""
        elif self._arena is None:
            pin = where.type == "cpu" and self._wire.type == "cuda"
            # An engine in inference mode would make a tensor that another thread may not write to.
            with torch.inference_mode(False):
                self._arena = torch.zeros(program.nbytes, dtype=torch.uint8, device=where, pin_memory=pin)
            synchronize(self._wire)
        return {"stages": stages, "bytes": program.nbytes}

    def _check_idle(self) -> None:
        if self._stage is not None and self._stage.state == "running":
            raise SyncError(f"attempt {self._stage.attempt} is still being received")

    def _begin(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Starts to receive ``attempt``; with ``base`` set, senders may send deltas against that attempt."""
        self._check_idle()
        program = self._ready(given["program"])
        if self._arena is None:
            raise SyncError("this rank has no arena to stage in")
        if given["base"] and given["base"] != self._base:
            raise SyncError(f"deltas build on attempt {given['base']!r}, but the arena holds {self._base!r}")
        stage = self._stage = Stage(given["attempt"])
        self._base = ""

        def run() -> None:
            start = time.monotonic()
            try:
                with side_stream(self._wire):
                    links = self._fill_arena(program, given, stage)
                    stage.seconds["total"] = time.monotonic() - start
                    self._base = stage.attempt
                    # First, since the commit may follow at once.
                    stage.state = "staged"
                    self._confirm(links, program, given, stage)
            except Exception as error:  # noqa: BLE001 - whatever it is, the driver has to hear of it
                self._leave()
                stage.error = f"{type(error).__name__}: {error}"
                stage.state = "failed"

        threading.Thread(target=run, name="megasync-stage", daemon=True).start()
        return stage.report()

    def _poll(self, given: Mapping[str, Any]) -> dict[str, Any]:
        return self._stage.report() if self._stage else {"attempt": "", "state": "none", "error": ""}

    def _drop(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Forgets what is staged and leaves the group. A running stage cannot be dropped: it ends by its deadline."""
        self._check_idle()
        self._leave()
        self._stage = None
        return {}

    def _ready(self, wanted: str) -> Program:
        if self._program is None or self._program.digest != wanted:
            raise SyncError("this rank has no program, or another one than the senders")
        return self._program

    # Receiving

    def _join(self, given: Mapping[str, Any], deadline: Deadline) -> Links:
        """The links to the senders; those of the attempt before when the name is the same."""
        if self._links is None or self._link_name != given["name"]:
            self._leave()
            timeout = min(given["join"], deadline.left().total_seconds())
            store = join_store(given["host"], given["port"], timeout)
            members = len(given["sources"])
            self._links = Links(
                store,
                given["name"],
                members + self._tp,
                members + given["engine_ranks"],
                given["backend"],
                given["own_host"],
                timeout,
            )
            self._link_name = given["name"]
        return self._links

    def _leave(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            try:
                links.close()
            except RuntimeError as error:
                log.warning("the links %s could not be closed: %s", self._link_name, error)

    def _fill_arena(self, program: Program, given: Mapping[str, Any], stage: Stage) -> Links:
        """Brings the whole arena to what the senders have now, parcel by parcel; over these links."""
        direct = not given["base"] and self._lands_in_arena()
        ring = None if direct else self._ring(program)
        landing = (lambda index, parcel: self._slice(parcel)) if direct else (lambda index, parcel: ring[index % 2])
        # Behind a header of unknown size nothing can be posted yet.
        ahead = 1 if given["base"] else len(program.parcels) if direct else len(ring)
        links, deadline = self._connect(given, stage)
        for parcel, message, header in self._arrivals(program, given, stage, links, deadline, landing, ahead):
            kept = self._slice(parcel)
            if header.kind == DELTA:
                values = kept.view(parcel.dtype)[: parcel.elements]
                delta.apply(message.to(values.device), header.changed, values)
            elif not direct:
                kept.copy_(message)
            found = self._digest(kept, stage)
            if given["headers"]:
                _compare(parcel, found, stage.digests[parcel.tag])
            else:
                stage.digests[parcel.tag] = found
        if not given["headers"]:
            self._compare_all(program, given, stage, links, deadline)
        return links

    def _lands_in_arena(self) -> bool:
        """Whether messages can arrive where they are kept: not from a GPU in host memory."""
        return self._arena.device == self._wire

    def _compare_all(
        self, program: Program, given: Mapping[str, Any], stage: Stage, links: Links, deadline: Deadline
    ) -> None:
        """Takes each sender's table of digests, in the order of its parcels, and compares it with what arrived."""
        for index, source in enumerate(given["sources"]):
            parcels = [parcel for parcel in program.parcels if parcel.source == source]
            if parcels:
                table = torch.zeros(len(parcels), dtype=torch.int64, device=self._wire)
                _wait(links.receive(table, index, TABLE), deadline, given["stall"], parcels[-1])
                for parcel, expected in zip(parcels, table.tolist(), strict=True):
                    _compare(parcel, stage.digests[parcel.tag], expected & MASK)

    def _confirm(self, links: Links, program: Program, given: Mapping[str, Any], stage: Stage) -> None:
        """Tells a sender that everything is here. A driver that does not hear of it asks, so a failure is only logged."""
        microseconds = int(1e6 * stage.seconds.get("digest", 0.0))
        words = torch.tensor([signed(combine(stage.digests)), microseconds], device=self._wire)
        try:
            links.send(words, given["sources"].index(program.confirmed_to), CONFIRMED).wait(
                timedelta(seconds=given["stall"])
            )
        except RuntimeError as error:
            log.warning("attempt %s is staged, but no sender heard of it: %s", stage.attempt, error)

    def _connect(self, given: Mapping[str, Any], stage: Stage) -> tuple[Links, Deadline]:
        start, deadline = time.monotonic(), Deadline(given["timeout"])
        links = self._join(given, deadline)
        stage.seconds["join"] = time.monotonic() - start
        return links, deadline

    def _ring(self, program: Program) -> list[torch.Tensor]:
        return [torch.empty(program.largest, dtype=torch.uint8, device=self._wire) for _ in range(2)]

    def _arrivals(
        self,
        program: Program,
        given: Mapping[str, Any],
        stage: Stage,
        links: Links,
        deadline: Deadline,
        landing: Callable[[int, Inbound], torch.Tensor],
        ahead: int,
    ) -> Iterator[tuple[Inbound, torch.Tensor, Header]]:
        """(parcel, its message, its header) in order; the next ``ahead`` messages are on their way meanwhile."""
        members = {rank: index for index, rank in enumerate(given["sources"])}
        headers = torch.zeros(len(program.parcels), len(Header._fields), dtype=torch.int64, device=self._wire)
        coming = enumerate(program.parcels)
        posted: deque[tuple[int, Inbound, Any, Any]] = deque()

        def receive(index: int, parcel: Inbound, nbytes: int) -> Any:
            return links.receive(landing(index, parcel)[:nbytes], members[parcel.source], 2 * parcel.tag + 1)

        def post(count: int) -> None:
            for index, parcel in islice(coming, count):
                header = (
                    links.receive(headers[index], members[parcel.source], 2 * parcel.tag) if given["headers"] else None
                )
                posted.append((index, parcel, header, None if given["base"] else receive(index, parcel, parcel.nbytes)))

        post(ahead)
        while posted:
            index, parcel, work, payload = posted.popleft()
            header = Header(FULL, parcel.nbytes, parcel.elements, 0)
            if work is not None:
                _wait(work, deadline, given["stall"], parcel)
                header = Header(*headers[index].tolist())
                stage.digests[parcel.tag] = header.digest & MASK
            stage.received += header.nbytes
            _wait(payload or receive(index, parcel, header.nbytes), deadline, given["stall"], parcel)
            yield parcel, landing(index, parcel)[: header.nbytes], header
            post(1)

    def _digest(self, message: torch.Tensor, stage: Stage) -> int:
        start = time.monotonic()
        found = digest(message)
        stage.seconds["digest"] = stage.seconds.get("digest", 0.0) + time.monotonic() - start
        return found

    def _slice(self, parcel: Inbound) -> torch.Tensor:
        return self._arena[parcel.start : parcel.start + parcel.nbytes]

    # Committing

    def check(self, given: Mapping[str, Any]) -> None:
        """Raises SyncError unless ``attempt`` is staged here, whole, or is to be streamed, and the parameters are as they
        were when they were traced; writes nothing."""
        program = self._ready(given["program"])
        present = self._present_forms(program)
        for name, form in self._forms.items():
            if present[name] != form:
                raise SyncError(
                    f"the engine keeps {name} as {present[name]} during an update (shape, strides, dtype), but as {form} "
                    "when its layout was traced: a kernel wants it packed; set sync.transport to broadcast or disk"
                )
        if given.get("stream"):
            return
        stage = self._stage
        if stage is None or stage.attempt != given["attempt"] or stage.state != "staged":
            found = f"{stage.attempt!r} is {stage.state}" if stage else "nothing is"
            raise SyncError(f"attempt {given['attempt']!r} is not staged here; {found}")

    @torch.no_grad()
    def commit(self, given: Mapping[str, Any]) -> None:
        """Copies the staged ``attempt`` into the live parameters; `check` must have passed on every rank."""
        program, params = self._ready(given["program"]), self._params()
        # A loader may fill more than stays filled.
        for fill in program.fills:
            Place(*fill[:-1]).of(params[fill.param]).fill_(fill.value)
        if given.get("stream"):
            self._stream(program, given, params)
        else:
            torch._foreach_copy_(*self._copies(program, params), non_blocking=True)
        # The arena may be written again as soon as this is answered.
        synchronize(self._wire)

    def _present_forms(self, program: Program) -> dict[str, tuple]:
        params = self._params()
        return {name: (tuple(params[name].shape), params[name].stride(), params[name].dtype) for name in program.params}

    def _copies(
        self, program: Program, params: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(parameter rectangles, arena rectangles), kept while the parameters stay where they are."""
        where = [param.data_ptr() for param in params.values()]
        if self._pairs is None or self._pairs[0] != where:
            pairs = [pair for parcel in program.parcels for pair in parcel.slots(self._slice(parcel), params)]
            self._pairs = where, [target for target, _ in pairs], [source for _, source in pairs]
        return self._pairs[1:]

    def _stream(self, program: Program, given: Mapping[str, Any], params: Mapping[str, torch.Tensor]) -> None:
        """Loads each parcel into the live parameters as soon as it is there and its digest is right."""
        stage, ring = Stage(given["attempt"]), self._ring(program)
        try:
            links, deadline = self._connect(given, stage)
            for parcel, message, _ in self._arrivals(
                program, given, stage, links, deadline, lambda index, _: ring[index % 2], len(ring)
            ):
                _compare(parcel, self._digest(message, stage), stage.digests[parcel.tag])
                for target, source in parcel.slots(message, params):
                    target.copy_(source)
        except Exception:
            self._leave()
            raise


def _compare(parcel: Inbound, found: int, expected: int) -> None:
    if found != expected:
        raise SyncError(
            f"parcel {parcel.tag} from trainer rank {parcel.source} ({parcel.places[0].param} ..) arrived with "
            f"digest {found:016x}, but was sent with {expected:016x}"
        )


def _wait(work: Any, deadline: Deadline, stall: float, parcel: Inbound) -> None:
    """Waits for one message, at most ``stall`` seconds."""
    try:
        work.wait(min(deadline.left(), timedelta(seconds=stall)))
    except (RuntimeError, SyncError) as error:
        raise SyncError(f"parcel {parcel.tag} from trainer rank {parcel.source}: {error}") from error
