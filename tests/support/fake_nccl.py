"""A cluster of GPUs that talk over NCCL, in virtual time: who waits for whom, and for how long.

`Machine` is the cluster. Each process of it runs a program that was recorded beforehand, a list of `Action` (see
`fake_nccl_group`). No bytes move. Operations behave as follows:

- A communicator is created by all its members together. Each call blocks its process until the last member has called,
  and then for a time that grows with the number of members. Nothing interrupts it: no deadline, no death of a member.
  (NCCL's guide, "Creating a Communicator"; NVIDIA/nccl issue 1677.)
- The first message from one member to another connects the two. That blocks both processes until both have started it:
  ncclGroupEnd runs `ncclTransportP2pSetup` before it launches anything (NCCL's src/group.cc, `groupLaunch`).
- Operations of one communicator run one after another on its stream in each process. A send occupies its stream until
  the receiver has launched the matching receive, and the other way round ("Point-to-point communication"; small
  messages may fit into NCCL's buffers, issue 544, on which no program may rely).
- Messages have no tags: the n-th send from one member to another meets the n-th receive. The tag that the caller had in
  mind is compared nevertheless; another one is an entry in `Machine.faults`, since the bytes would land elsewhere.
- Every member must start the same collectives in the same order; others are an entry in `Machine.faults` and a hang.
- A running operation occupies thread blocks, also while it waits for its peer. Kernels go to the GPU through a few
  hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), each in the order of launches: one that has to wait for its stream
  holds up those behind it, also of other streams (CUDA C++ guide, "False Dependencies").
- A process that dies leaves the others waiting. An abort releases only the process that calls it, and makes the
  communicator unusable there ("Error handling and communicator abort").
- Torch's watchdog ends a process when an operation of a watched communicator takes longer than its timeout.

When nothing moves any more and somebody waits, `Machine.stuck` says who waits for whom. Transfers share network cards
and NVLink in the order in which they start; computation takes no time unless a program says so. Numbers are in `Costs`.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Costs:
    """What things take on a node of eight H100s with a 400 Gb/s card for each. Sources beside the numbers."""

    # Creating a communicator, in seconds. NVIDIA/nccl issue 534 measures 2.0 s for 8 ranks and 4.1 s for 32; 1646 has
    # 2.6 s for 8 without the load of the kernels, and 1156 2.5 minutes for "certain K" ranks.
    init_seconds: float = 1.35
    init_seconds_per_rank: float = 0.085
    # Connecting two members: an assumption.
    connect_seconds: float = 0.02
    # One message: an assumption.
    message_seconds: float = 20e-6
    # Bytes per second of a card and of NVLink, in each direction (NVIDIA's data sheets), and of one channel of NCCL
    # (an assumption).
    card: float = 50e9
    nvlink: float = 450e9
    channel: float = 20e9
    # Thread blocks of NCCL that a GPU runs at the same time: one for each multiprocessor, an assumption.
    blocks: int = 132
    # Channels of a communicator that does not limit them.
    channels: int = 32

    def init(self, ranks: int) -> float:
        """Seconds to create a communicator."""
        return self.init_seconds + self.init_seconds_per_rank * ranks


class Part(NamedTuple):
    """A send, a receive or a collective. ``peer`` is a member (of a collective its root), ``tag`` what it is about."""

    kind: str
    peer: int
    nbytes: int
    tag: int


# What a program does: the name of a method of `Machine` and its arguments after the host.
Action = tuple[Any, ...]


class Operation:
    """One kernel."""

    __slots__ = ("comm", "dead", "done", "error", "launched", "part", "process", "waiters", "watch")

    def __init__(self, process: Process, comm: Communicator, part: Part) -> None:
        self.process, self.comm, self.part = process, comm, part
        self.launched = self.done = self.dead = False
        self.error = ""
        self.waiters: list[Host] = []

    def __str__(self) -> str:
        part = self.part
        way = {"send": "a send to", "recv": "a receive from"}.get(part.kind, f"a {part.kind} with root")
        return f"{way} {self.comm.who(part.peer)} ({part.nbytes} bytes, tag {part.tag}, {self.comm.name})"

    def pair(self, member: int) -> tuple[int, int] | None:
        """(sender, receiver) of a message of this member; None for a collective."""
        pairs = {"send": (member, self.part.peer), "recv": (self.part.peer, member)}
        return pairs.get(self.part.kind)


class Communicator:
    """A communicator of the members ``ranks`` of a group, in each of its processes."""

    def __init__(self, name: str, group: Group, ranks: tuple[int, ...], channels: int) -> None:
        self.name, self.group, self.ranks, self.channels = name, group, ranks, channels
        self.watch: float | None = None
        self.ready = False
        self.calling: dict[int, Host] = {}
        # By (sender, receiver): messages that have been launched and not met.
        self.unmet: dict[tuple[int, int], deque[Operation]] = defaultdict(deque)
        self.connected: set[tuple[int, int]] = set()
        self.connecting: dict[tuple[int, int], Host] = {}
        self.collectives: dict[int, list[tuple[int, Operation]]] = defaultdict(list)
        self.started: Counter[int] = Counter()
        self.broken: set[int] = set()

    def who(self, member: int) -> str:
        process = self.group.members.get(member)
        return process.name if process else f"member {member} of {self.group.name}"


@dataclass
class Group:
    """A torch process group: which process is which member."""

    name: str
    size: int
    members: dict[int, Process] = field(default_factory=dict)


@dataclass(eq=False)
class Process:
    """A process with one GPU. ``queues`` are its hardware queues, ``card`` the speed of its network card."""

    name: str
    node: int = 0
    queues: int = 8
    card: float | None = None
    # What follows is the machine's.
    dead: bool = False
    blocks: int = 0
    peak_blocks: int = 0
    communicators: int = 0
    peak_communicators: int = 0
    sent: int = 0
    received: int = 0
    streams: dict[Communicator, deque[Operation]] = field(default_factory=dict)
    hardware: list[deque[Operation]] = field(default_factory=list)
    queue_of: dict[Communicator, deque[Operation]] = field(default_factory=dict)
    # Seconds at which its card and NVLink are free again: sending, receiving.
    free: dict[tuple[str, bool], float] = field(default_factory=dict)
    peers: set[str] = field(default_factory=set)


class Host:
    """A thread of a process, as the machine sees it."""

    def __init__(self, process: Process, program: Iterable[Action]) -> None:
        self.process = process
        self.program = iter(program)
        self.operations: dict[int, Operation] = {}
        self.why: tuple[Any, ...] | None = None
        self.deadline: float | None = None
        self.alarm: float | None = None
        self.error: str = ""
        self.ended: float | None = None
        self.times: dict[str, float] = {}
        self.joining: list[Host] = []
        self.abandons = False


class Machine:
    """See the module. Attributes:

    now: seconds since the start.
    faults: messages that met a receive of something else, and collectives that differ.
    stuck: who waited for whom when nothing moved any more, or "".
    failures: what a process raised, by its name, with the time.
    connected: seconds until the last communicator and connection so far.
    """

    def __init__(self, costs: Costs | None = None, deadlines: bool = True) -> None:
        """Without ``deadlines`` nobody gives up: to see how long something would take."""
        self.costs = costs or Costs()
        self._deadlines = deadlines
        self.now = 0.0
        self.faults: list[str] = []
        self.stuck = ""
        self.failures: dict[str, tuple[float, str]] = {}
        self.connected = 0.0
        self.messages = 0
        self.processes: list[Process] = []
        self.hosts: list[Host] = []
        self._groups: dict[str, Group] = {}
        self._communicators: dict[str, Communicator] = {}
        self._members: dict[tuple[str, Process], int] = {}
        self._keys: Counter[str] = Counter()
        self._forked: dict[tuple[Process, int], Host] = {}
        self._awaiting: dict[str, list[tuple[int, Host]]] = defaultdict(list)
        self._events: list[tuple[float, int, bool, Callable[..., None], tuple[Any, ...]]] = []
        self._moving = 0
        self._order = count()
        names = "work mark die set_key await_keys join init start wait abort fork rejoin"
        self._actions = {name: getattr(self, f"_{name}") for name in names.split()}
        self._ready: deque[Host] = deque()
        self._blocked: dict[Host, None] = {}

    # Programs

    def add(self, process: Process, program: Iterable[Action]) -> None:
        """Adds a process and the program that it runs."""
        process.hardware = [deque() for _ in range(process.queues)]
        self.processes.append(process)
        self._begin(Host(process, program))

    def _begin(self, host: Host) -> None:
        self.hosts.append(host)
        self._ready.append(host)

    def run(self) -> None:
        """Runs all programs to their end. A program whose action fails aborts its communicators and ends."""
        while True:
            while self._ready:
                self._go_on(self._ready.popleft())
            if all(host.ended is not None for host in self.hosts) or not self._step():
                break

    def _go_on(self, host: Host) -> None:
        while host.ended is None:
            if host.error:
                self.failures.setdefault(host.process.name, (self.now, host.error))
                for group in [group for group, process in self._members if process is host.process]:
                    self._abort(host, group)
                return self._end(host)
            action = next(host.program, None)
            if action is None:
                return self._end(host)
            if not self._actions[action[0]](host, *action[1:]):
                return None
        return None

    # Events

    def _at(self, seconds: float, call: Callable[..., None], *arguments: Any, moves: bool = True) -> None:
        self._moving += moves
        heappush(self._events, (seconds, next(self._order), moves, call, arguments))

    def _step(self) -> bool:
        """Takes the next event; False when there is none."""
        if not self._moving and self._blocked and not self.stuck:
            self.stuck = self.explain()
        if not self._events:
            return False
        self.now, _, moves, call, arguments = heappop(self._events)
        self._moving -= moves
        call(*arguments)
        return True

    def _block(self, host: Host, why: tuple[Any, ...], limit: float | None = None) -> bool:
        host.why = why
        host.deadline = None if limit is None or not self._deadlines else self.now + limit
        self._blocked[host] = None
        if host.deadline is not None and (host.alarm is None or host.alarm > host.deadline):
            host.alarm = host.deadline
            self._at(host.deadline, self._expire, host, moves=False)
        return False

    def _expire(self, host: Host) -> None:
        host.alarm = None
        if host not in self._blocked or host.deadline is None:
            return
        if self.now >= host.deadline:
            what = self._reason(host)[0]
            self._release(host, f"no time left: {host.process.name} {what}")
        else:
            host.alarm = host.deadline
            self._at(host.deadline, self._expire, host, moves=False)

    def _release(self, host: Host, error: str = "") -> None:
        if host not in self._blocked:
            return
        del self._blocked[host]
        host.why, host.error = None, error
        self._ready.append(host)

    # Actions; each returns whether it is over

    def _work(self, host: Host, seconds: float) -> bool:
        self._at(self.now + seconds, self._release, host)
        return self._block(host, ("work",))

    def _mark(self, host: Host, name: str) -> bool:
        host.times[name] = self.now
        return True

    def _die(self, host: Host) -> bool:
        self.kill(host.process)
        host.ended = self.now
        return False

    def _fork(self, host: Host, number: int, program: Iterable[Action]) -> bool:
        """Another thread of the same process begins."""
        child = self._forked[host.process, number] = Host(host.process, program)
        self._begin(child)
        return True

    def _rejoin(self, host: Host, number: int) -> bool:
        """Waits for the end of a thread that `fork` began."""
        child = self._forked[host.process, number]
        if child.ended is not None:
            return True
        child.joining.append(host)
        return self._block(host, ("join", child))

    def _end(self, host: Host) -> None:
        host.ended = self.now
        for waiting in host.joining:
            self._release(waiting)

    def _set_key(self, host: Host, stem: str) -> bool:
        """A member's key in the store."""
        self._keys[stem] += 1
        for needed, waiting in list(self._awaiting.get(stem, ())):
            if self._keys[stem] >= needed:
                self._awaiting[stem].remove((needed, waiting))
                self._release(waiting)
        return True

    def _await_keys(self, host: Host, stem: str, needed: int, limit: float | None) -> bool:
        if self._keys[stem] >= needed:
            return True
        self._awaiting[stem].append((needed, host))
        return self._block(host, ("await", stem, needed), limit)

    def _join(self, host: Host, group: str, member: int, size: int) -> bool:
        self._groups.setdefault(group, Group(group, size)).members[member] = host.process
        self._members[group, host.process] = member
        return True

    def _init(
        self,
        host: Host,
        group: str,
        member: int,
        name: str,
        ranks: tuple[int, ...],
        channels: int | None,
        watch: float | None,
        limit: float | None,
        abandon: bool = False,
    ) -> bool:
        """Creates the communicator of the members ``ranks``. ``limit`` is for the id that the first of them makes.

        With ``abandon`` it is for the whole: the program leaves the call to a thread and goes on without it.
        """
        comm = self._communicators.get(name)
        if comm is None:
            comm = Communicator(name, self._groups[group], ranks, channels or self.costs.channels)
            comm.watch = watch
            self._communicators[name] = comm
        comm.calling[member] = host
        if ranks[0] in comm.calling:
            # From here on nothing interrupts the call.
            for waiting in comm.calling.values():
                waiting.deadline = waiting.deadline if waiting.abandons else None
        host.abandons = abandon
        self._block(host, ("init", comm), limit if abandon or ranks[0] not in comm.calling else None)
        if len(comm.calling) == len(ranks):
            self._at(self.now + self.costs.init(len(ranks)), self._created, comm)
        return False

    def _created(self, comm: Communicator) -> None:
        if any(host.process.dead for host in comm.calling.values()):
            return
        comm.ready = True
        self.connected = self.now
        for host in comm.calling.values():
            process = host.process
            process.communicators += 1
            process.peak_communicators = max(process.peak_communicators, process.communicators)
            process.streams[comm] = deque()
            process.queue_of[comm] = process.hardware[len(process.queue_of) % process.queues]
            self._release(host)
        comm.calling.clear()

    def _start(self, host: Host, name: str, member: int, part: Part, handle: int) -> bool:
        """Starts an operation; for its first message to or from a peer, first connects to it."""
        comm, process = self._communicators[name], host.process
        if member in comm.broken:
            host.error = f"{comm.name} cannot be used any more in {process.name}"
            self._ready.append(host)
            return False
        operation = host.operations[handle] = Operation(process, comm, part)
        pair = operation.pair(member)
        if pair is None or pair in comm.connected:
            self._enqueue(operation)
            return True
        other = comm.connecting.setdefault(pair, host)
        if other is not host and not other.process.dead:
            self._at(self.now + self.costs.connect_seconds, self._connect, comm, pair, (other, host))
        return self._block(host, ("connect", operation))

    def _connect(self, comm: Communicator, pair: tuple[int, int], hosts: tuple[Host, Host]) -> None:
        if any(host.process.dead for host in hosts):
            return
        comm.connected.add(pair)
        del comm.connecting[pair]
        self.connected = self.now
        one, other = (host.process for host in hosts)
        one.peers.add(other.name)
        other.peers.add(one.name)
        for host in hosts:
            if host in self._blocked and host.why is not None:
                self._enqueue(host.why[1])
                self._release(host)

    def _wait(self, host: Host, handle: int, limit: float | None) -> bool:
        operation = host.operations.pop(handle)
        if operation.error:
            host.error = operation.error
            self._ready.append(host)
            return False
        if operation.done:
            return True
        operation.waiters.append(host)
        return self._block(host, ("wait", operation), limit)

    def _abort(self, host: Host, group: str) -> bool:
        """Aborts all communicators of a group in this process."""
        for comm in [comm for comm in host.process.streams if comm.group.name == group]:
            comm.broken.add(self._member(comm, host.process))
            host.process.communicators -= 1
            for operation in host.process.streams.pop(comm):
                self._cancel(operation, f"{comm.name} was aborted")
        self._pump(host.process)
        return True

    def kill(self, process: Process) -> None:
        """The process dies where it is."""
        process.dead = True
        for stream in process.streams.values():
            for operation in stream:
                operation.dead = True
        for host in [host for host in self.hosts if host.process is process]:
            self._blocked.pop(host, None)
            host.ended = self.now

    def kill_at(self, seconds: float, process: Process) -> None:
        """The process dies at that time, if anything happens then."""
        self._at(seconds, self.kill, process)

    # Kernels

    def _enqueue(self, operation: Operation) -> None:
        process, comm = operation.process, operation.comm
        process.streams[comm].append(operation)
        process.queue_of[comm].append(operation)
        if comm.watch is not None:
            self._at(self.now + comm.watch, self._watchdog, operation, moves=False)
        self._pump(process)

    def _watchdog(self, operation: Operation) -> None:
        if not operation.done and not operation.dead and not operation.process.dead:
            name = operation.process.name
            self.failures[name] = (self.now, f"ended by torch's watchdog: {operation} took {operation.comm.watch:g} s")
            self.kill(operation.process)

    def _pump(self, process: Process) -> None:
        """Launches what can be launched: the first of each queue, once its stream and enough blocks are free."""
        for queue in process.hardware:
            while queue:
                operation = queue[0]
                if operation.dead:
                    queue.popleft()
                    continue
                if process.streams[operation.comm][0] is not operation:
                    break
                if process.blocks + operation.comm.channels > self.costs.blocks:
                    break
                queue.popleft()
                self._launch(operation)

    def _launch(self, operation: Operation) -> None:
        process, comm = operation.process, operation.comm
        operation.launched = True
        process.blocks += comm.channels
        process.peak_blocks = max(process.peak_blocks, process.blocks)
        member = self._member(comm, process)
        pair = operation.pair(member)
        if pair is None:
            return self._collect(comm, member, operation)
        unmet = comm.unmet[pair]
        if unmet and unmet[0].part.kind != operation.part.kind:
            sides = operation, unmet.popleft()
            self._meet(*(sides if operation.part.kind == "send" else reversed(sides)))
        else:
            unmet.append(operation)

    def _member(self, comm: Communicator, process: Process) -> int:
        return self._members[comm.group.name, process]

    def _meet(self, send: Operation, receive: Operation) -> None:
        if (send.part.tag, send.part.nbytes) != (receive.part.tag, receive.part.nbytes):
            self.faults.append(
                f"out of order: {receive.process.name} has {receive}, but what comes is {send} of {send.process.name}"
            )
            if send.part.nbytes != receive.part.nbytes:
                return
        end = self._transfer(send.process, receive.process, send.part.nbytes, send.comm.channels)
        self._at(end, self._arrive, send, receive)

    def _transfer(self, source: Process, target: Process, nbytes: int, channels: int) -> float:
        """When a transfer that starts now ends. What shares a card or NVLink queues behind what started earlier."""
        near = source.node == target.node
        kind, end = ("nvlink", self.costs.nvlink) if near else ("card", 0.0)
        last = self.now + nbytes / (channels * self.costs.channel)
        for process, sends in ((source, True), (target, False)):
            speed = end or process.card or self.costs.card
            free = max(self.now, process.free.get((kind, sends), 0.0)) + nbytes / speed
            process.free[kind, sends] = free
            last = max(last, free)
        return last + self.costs.message_seconds

    def _arrive(self, send: Operation, receive: Operation) -> None:
        if send.dead or receive.dead:
            return
        send.process.sent += send.part.nbytes
        receive.process.received += send.part.nbytes
        self.messages += 1
        self._finish(send)
        self._finish(receive)

    def _collect(self, comm: Communicator, member: int, operation: Operation) -> None:
        number = comm.started[member]
        comm.started[member] += 1
        calls = comm.collectives[number]
        calls.append((member, operation))
        if len(calls) < len(comm.ranks):
            return
        (first, begun), *others = calls
        expected = begun.part
        for other, started in others:
            if started.part != expected:
                self.faults.append(
                    f"collective {number} of {comm.name}: {comm.who(first)} starts {tuple(expected)}, "
                    f"but {comm.who(other)} starts {tuple(started.part)}"
                )
                return
        del comm.collectives[number]
        speed = min(process.card or self.costs.card for process in comm.group.members.values())
        end = self.now + expected.nbytes / speed + len(calls) * self.costs.message_seconds
        self._at(end, self._broadcast, expected, calls)

    def _broadcast(self, part: Part, calls: Sequence[tuple[int, Operation]]) -> None:
        if any(operation.dead for _, operation in calls):
            return
        root = next(operation for member, operation in calls if member == part.peer)
        root.process.sent += part.nbytes
        self.messages += 1
        for _, operation in calls:
            if operation is not root:
                operation.process.received += part.nbytes
            self._finish(operation)

    def _finish(self, operation: Operation) -> None:
        operation.done = True
        process = operation.process
        process.blocks -= operation.comm.channels
        process.streams[operation.comm].popleft()
        for host in operation.waiters:
            self._release(host)
        operation.waiters.clear()
        self._pump(process)

    def _cancel(self, operation: Operation, why: str) -> None:
        operation.dead, operation.error = True, why
        if operation.launched:
            operation.process.blocks -= operation.comm.channels
            for unmet in operation.comm.unmet.values():
                if operation in unmet:
                    unmet.remove(operation)
        for host in operation.waiters:
            self._release(host, why)
        operation.waiters.clear()

    # Explanations

    def explain(self) -> str:
        """Who waits for whom: a cycle if there is one, else where the chains end; waits in the store come last."""
        ends: list[tuple[bool, str]] = []
        waiting = [host for host in self._blocked if host.why and host.why[0] != "work"]
        by_process: dict[Process, list[Host]] = defaultdict(list)
        for host in waiting:
            by_process[host.process].append(host)
        told: set[Host] = set()
        for first in waiting:
            chain: list[Host] = []
            host: Host | None = first
            while host is not None and host not in chain and host not in told:
                chain.append(host)
                host = self._next(host, by_process)
            if host in chain:
                cycle = chain[chain.index(host) :]
                first = min(range(len(cycle)), key=lambda at: self.processes.index(cycle[at].process))
                return "deadlock: " + "; ".join(self._tell(each) for each in cycle[first:] + cycle[:first])
            told.update(chain)
            if host is None:
                _, process = self._reason(chain[-1])
                end = f"; {process.name} {self._state(process)}" if process else ""
                ends.append((chain[-1].why is not None and chain[-1].why[0] == "await", self._tell(chain[-1]) + end))
        return "stuck: " + "; ".join(line for _, line in sorted(ends, key=lambda end: end[0])[:8])

    def _tell(self, host: Host) -> str:
        return f"{host.process.name} {self._reason(host)[0]}"

    def _next(self, host: Host, by_process: dict[Process, list[Host]]) -> Host | None:
        """The blocked thread on which a blocked thread depends."""
        if host.why is not None and host.why[0] == "join":
            return host.why[1]
        _, process = self._reason(host)
        others = by_process.get(process, []) if process else []
        # A thread of that process which could still start what this one waits for has ended, or is one of these.
        return min(others, key=lambda other: self._communicator(other) is not self._communicator(host), default=None)

    def _communicator(self, host: Host) -> Communicator | None:
        what = host.why[1] if host.why and len(host.why) > 1 else None
        return what.comm if isinstance(what, Operation) else what if isinstance(what, Communicator) else None

    def _state(self, process: Process) -> str:
        if process.dead:
            return "is dead"
        ended = all(host.ended is not None for host in self.hosts if host.process is process)
        return "has ended" if ended else "does something else"

    def _reason(self, host: Host) -> tuple[str, Process | None]:
        """(what a blocked thread waits for, the process on which it depends)."""
        what, *rest = host.why or ("nothing",)
        match what:
            case "join":
                return "waits for one of its threads", None
            case "await":
                return f"waits in the store for {rest[1]} members of {rest[0]}, {self._keys[rest[0]]} are there", None
            case "init":
                comm = rest[0]
                missing = [member for member in comm.ranks if member not in comm.calling]
                if not missing:
                    gone = next((each.process for each in comm.calling.values() if each.process.dead), None)
                    return f"creates {comm.name}", gone
                who = ", ".join(comm.who(member) for member in missing[:3])
                return f"creates {comm.name} and waits for {who}", comm.group.members.get((*missing, -1)[0])
            case "connect":
                return f"connects for {rest[0]}", rest[0].comm.group.members.get(rest[0].part.peer)
            case "wait":
                return self._blocker(rest[0])
        return f"waits for {what}", None

    def _blocker(self, operation: Operation) -> tuple[str, Process | None]:
        process, comm = operation.process, operation.comm
        text, seen = f"waits for {operation}", {operation}
        while not operation.launched:
            queue = process.queue_of[comm]
            before = process.streams[comm][0]
            if before is operation:
                before = next((other for other in queue if not other.dead), operation)
                if before is operation or before in seen:
                    return text + f", for which {process.blocks} of {self.costs.blocks} thread blocks are taken", None
                text += f", in the hardware queue behind {before}"
            else:
                text += f", on its stream behind {before}"
            seen.add(before)
            operation, comm = before, before.comm
        member, peer = self._member(comm, process), comm.group.members.get(operation.part.peer)
        if (pair := operation.pair(member)) is not None:
            return text, peer if operation in comm.unmet[pair] else None
        started = (calls for calls in comm.collectives.values() if any(operation in call for call in calls))
        if (calls := next(started, None)) is None:
            # It was under way when a member died.
            return text, next((each for each in comm.group.members.values() if each.dead), None)
        missing = [other for other in comm.ranks if all(other != member for member, _ in calls)]
        if not missing:
            return text + ", which the members started differently", None
        others = ", ".join(map(comm.who, missing[:3]))
        return text + f", which {others} did not start", comm.group.members.get(missing[0])
