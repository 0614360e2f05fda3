"""Required relations between deadlines, defined once: checked at start and listed in docs/configuration.md.

A deadline that contains other waits must be longer than their sum. Otherwise it ends a run, or blames a component, that
is still within its own limits. `timeouts.no_progress` does not contain training steps, checkpoint saves, rank restarts
or weight syncs: each has its own deadline, and the watchdog does not count the time spent in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from megasync.config.limits import value_of
from megasync.config.schema import Config
from megasync.errors import ConfigError

# Waits without a configuration key, in seconds. A test compares them with the code that implements them.
BUFFER_RESTART = "the restart of a hung buffer"
FIXED = {BUFFER_RESTART: 240.0}

# Factors of a product: configuration keys, names in `FIXED`, or numbers.
Term = tuple[str | float, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """The sum of the terms in `shorter` must be less than the deadline `longer`.

    `applies` decides for which configurations the relation holds; `where` describes them in words.
    """

    shorter: tuple[Term, ...]
    longer: str
    why: str
    where: str = ""
    applies: Callable[[Config], bool] = lambda config: True


REQUEST, REWARD, NO_PROGRESS = "timeouts.request", "timeouts.reward", "timeouts.no_progress"
AGENT = "rollout.agent"
WORKER = "timeouts.rollout_worker"
# How long a hung server keeps its requests before it is declared dead, by each of the two kinds of health check.
PROBES: tuple[Term, ...] = (
    ("rollout.health.probe_failures", "rollout.health.probe_timeout"),
    ("rollout.health.probe_failures", "rollout.health.probe_seconds"),
)
CHECKS: tuple[Term, ...] = (
    ("rollout.health.request_failures", "rollout.health.request_timeout"),
    ("rollout.health.request_failures", "rollout.health.request_seconds"),
)
HUNG_SERVER = "requests to a hung server would fail before it is declared dead and they continue on another server"

RELATIONS = (
    Relation(((REQUEST,), (REWARD,)), NO_PROGRESS, "no group finishes before its requests and its rewards"),
    Relation(
        ((2.0, REQUEST), (REWARD,)),
        NO_PROGRESS,
        "no group finishes before its requests and those to the other model",
        "with reward_models, auxiliary_models or teachers",
        lambda config: bool(config.reward_models or config.auxiliary_models or config.teachers),
    ),
    Relation(
        ((REQUEST,), ("rollout.tools.timeout",), (REWARD,)),
        NO_PROGRESS,
        "no group finishes before its requests, tool calls and rewards",
        "with rollout.tools.functions",
        lambda config: bool(config.rollout.tools.functions),
    ),
    Relation(
        ((REQUEST,), ("timeouts.environment",)),
        NO_PROGRESS,
        "no group finishes before its requests and the environment's answers",
        "with rollout.environment",
        lambda config: config.rollout.environment is not None,
    ),
    Relation(
        (("timeouts.agent",), (REWARD,)),
        NO_PROGRESS,
        "no group finishes before its agents return and are scored",
        f"with {AGENT}",
        lambda config: config.rollout.agent is not None,
    ),
    Relation(
        ((REQUEST,),),
        "timeouts.agent",
        "an agent would be stopped, and its prompt would count as failed, while a server may still answer its request",
        f"with {AGENT}",
        lambda config: config.rollout.agent is not None,
    ),
    Relation(
        (*CHECKS, ("timeouts.shutdown",), ("timeouts.server_start",), (REQUEST,)),
        NO_PROGRESS,
        "if all servers hang, nothing finishes until one is declared dead and restarted and has answered a request",
    ),
    Relation(
        ((BUFFER_RESTART,),), NO_PROGRESS, "nothing finishes until a hung buffer is detected, killed and restarted"
    ),
    Relation(
        ((REWARD,),),
        WORKER,
        "a worker whose reward function blocks its event loop would be killed, although the function is within its "
        "deadline",
        "with rollout.workers",
        lambda config: config.rollout.workers > 0,
    ),
    Relation(
        ((WORKER,), ("timeouts.server_start",), (REQUEST,), (REWARD,)),
        NO_PROGRESS,
        "if all rollout workers hang, nothing finishes until one is killed and replaced and has finished a group",
        "with rollout.workers",
        lambda config: config.rollout.workers > 0,
    ),
    Relation(PROBES, REQUEST, HUNG_SERVER),
    Relation(CHECKS, REQUEST, HUNG_SERVER),
    Relation(
        (("timeouts.sync_stall",),),
        "timeouts.weight_sync",
        "the deadline of the phase would expire first, and the error would not name the stalled message",
        "with sync.transport=p2p or auto",
        lambda config: config.sync.transport in ("p2p", "auto"),
    ),
)


def check_deadlines(config: Config, own_agent: bool = False) -> None:
    """Raises ConfigError for the first violated relation, with the keys, their values and the fix.

    `own_agent`: a Python caller passes an agent, which replaces `rollout.agent`.
    """
    for relation in RELATIONS:
        if not (relation.applies(config) or (own_agent and AGENT in relation.where)):
            continue
        needed = sum(prod(_factor(config, factor) for factor in term) for term in relation.shorter)
        longest = value_of(config, relation.longer)
        if not needed < longest:
            terms = " + ".join(_term(term, config) for term in relation.shorter)
            total = f" = {needed:g} s" if sum(map(len, relation.shorter)) > 1 else ""
            raise ConfigError(
                f"{relation.longer}={longest:g} must be longer than {terms}{total}: {relation.why}; raise "
                f"{relation.longer} above {needed:g}, or lower the shorter deadlines"
            )


def deadline_table() -> str:
    """Returns the relations as a Markdown table."""
    rows = ["| longer | shorter | because | where |", "|---|---|---|---|"]
    for relation in RELATIONS:
        terms = " + ".join(_term(term) for term in relation.shorter)
        rows.append(f"| `{relation.longer}` | {terms} | {relation.why} | {relation.where or 'always'} |")
    return "\n".join(rows)


def _factor(config: Config, factor: str | float) -> float:
    if not isinstance(factor, str):
        return factor
    return FIXED[factor] if factor in FIXED else value_of(config, factor)


def _term(term: Term, config: Config | None = None) -> str:
    """A term as text: with the values of a configuration, or as Markdown if there is none."""
    words = []
    for factor in term:
        if not isinstance(factor, str):
            words.append(f"{factor:g}")
        elif config is not None:
            words.append(f"{factor}={_factor(config, factor):g}")
        else:
            words.append(f"{factor} ({FIXED[factor]:g} s)" if factor in FIXED else f"`{factor}`")
    return " x ".join(words)
