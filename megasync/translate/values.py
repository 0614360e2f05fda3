"""How values of other libraries become those of megasync's keys: the functions that `table` names.

Each takes the value of a row's option, and the options, of which it may read others; numbers of prompts, ranks and
steps follow from several. It returns the value of the row's key, or `Keys` with several. `Refused` is a value without a
counterpart. `Options` gives an option that the file does not have its default in that library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

from megasync.config.builtin import ADVANTAGES, LOSSES
from megasync.errors import MegasyncError
from megasync.translate.options import Given

Convert = Callable[[Any, "Options"], Any]
KINDS = {".parquet": "parquet", ".jsonl": "jsonl"}
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Refused(MegasyncError):
    """Why a value is not translated."""


class Open(MegasyncError):
    """Why a value cannot be known from the file alone."""


class Keys(dict[str, Any]):
    """Values of several keys, where one option says them together; ``lost`` says what of it is not translated.

    Without any, the option changes nothing, for the reason that ``said`` gives.
    """

    lost: str = ""
    said: str = "as by default"


class Options:
    """The options of a file, with the library's defaults beneath them."""

    def __init__(self, given: Given, defaults: Mapping[str, Any]) -> None:
        self.given, self._defaults = given, defaults

    def __getitem__(self, name: str) -> Any:
        """The value of an option, its default, or None. Raises Open for a value that the file alone does not say."""
        option = self.given.options.get(name)
        if option is None:
            return self._defaults.get(name)
        if option.unresolved:
            raise Open(f"{name}: {option.unresolved}")
        return option.value

    def __contains__(self, name: str) -> bool:
        return name in self.given.options

    def number(self, name: str, otherwise: float | None = None) -> float:
        value = self[name]
        value = otherwise if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Open(f"{name} is not a number in the file" if value is None else f"{name}={value} is not a number")
        return value

    def whole(self, name: str, otherwise: int | None = None) -> int:
        value = self.number(name, otherwise)
        if value != int(value):
            raise Refused(f"{name}={value} is not a whole number")
        return int(value)


# General forms


def always(result: Any) -> Convert:
    return lambda value, options: result


def words(**table: Any) -> Convert:
    """Values by their names in the library, where a - is written _."""

    def convert(value: Any, options: Options) -> Any:
        name = str(value).lower().replace("-", "_")
        if name not in table:
            raise Refused(f"{value} has no counterpart")
        return table[name]

    return convert


def without(*nothing: Any, instead: Any = None) -> Convert:
    """The value itself, or ``instead`` for values that mean none."""
    return lambda value, options: instead if value in nothing else value


def part(value: Any, options: Options) -> Keys:
    """An option that counts only together with that of another row."""
    keys = Keys()
    keys.said = "with another option"
    return keys


def unless(default: Any) -> Convert:
    """The value itself, unless it is what megasync does without the key."""
    return lambda value, options: Keys() if value == default else value


def scaled(factor: float) -> Convert:
    return lambda value, options: max(1, round(float(value) * factor))


def inverse(value: Any, options: Options) -> bool:
    return not flag(value)


def flag(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in ("true", "yes", "1", "on")
    return bool(value)


def on(name: str, *values: Any) -> Callable[[Options], bool]:
    """A condition: the option has one of the values; without any, it is on."""
    return lambda options: options[name] in values if values else flag(options[name])


def run_name(value: Any, options: Options) -> str:
    name = re.sub(r"[^\w.-]+", "-", str(value).rstrip("/").rpartition("/")[2]).strip("-")
    if not name or "${" in str(value):
        raise Refused("it has no letters and digits that could name a folder")
    return name


def listed(value: Any, options: Options) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def quotient(total: float, part: float, what: str) -> int:
    """How often a part goes into a total. Raises Refused unless that is a whole number of at least 1."""
    if part <= 0 or total < part or total % part:
        raise Refused(f"{what}: {total:g} is not a multiple of {part:g}")
    return int(total // part)


# Data


def dataset(source: Any) -> dict[str, Any]:
    """A data file as the section of a data set. Raises Refused for a kind that is not read."""
    path = str(source)
    kind = KINDS.get(PurePath(path).suffix.lower())
    if "://" in path:
        raise Refused(f"{path} is no file of this machine; copy it")
    if kind is None:
        raise Refused(f"{path} is neither .parquet nor .jsonl; say data.train.kind")
    return {"kind": kind, "source": path}


def files(key: str, sections: str, entry: str) -> Convert:
    """One file as the section ``key``, several as entries of ``sections``, each with the section ``entry``."""

    def convert(value: Any, options: Options) -> Keys:
        paths = listed(value, options)
        if len(paths) == 1:
            return Keys({f"{key}.{name}": each for name, each in dataset(paths[0]).items()})
        return named_files(list(zip(_names(paths), paths, strict=True)), sections, entry)

    return convert


def named_files(pairs: list[tuple[str, Any]], sections: str, entry: str) -> Keys:
    return Keys(
        {f"{sections}.{name}.{entry}{each}": value for name, path in pairs for each, value in dataset(path).items()}
    )


def _names(paths: list[Any]) -> list[str]:
    """Different names for files: their own, or those of their folders if these are alike."""
    stems = [PurePath(str(path)).stem for path in paths]
    if len(set(stems)) < len(stems):
        stems = [PurePath(str(path)).parent.name for path in paths]
    named = [re.sub(r"[^\w-]+", "-", stem).strip("-") or "set" for stem in stems]
    return [f"{name}-{at}" if named.count(name) > 1 else name for at, name in enumerate(named)]


def slime_eval(value: Any, options: Options) -> Keys:
    names = listed(value, options)
    if len(names) % 2:
        raise Refused("it is not pairs of a name and a file")
    pairs = [(re.sub(r"[^\w-]+", "-", str(name)), path) for name, path in zip(names[::2], names[1::2], strict=True)]
    if len(pairs) == 1:
        return Keys({f"data.eval.{name}": each for name, each in dataset(pairs[0][1]).items()})
    return named_files(pairs, "eval.sets", "data.")


def hub_dataset(split: str) -> Convert:
    def convert(value: Any, options: Options) -> Keys:
        if value is None:
            raise Open("the file names no data set")
        if PurePath(str(value)).suffix in KINDS:
            return Keys(dataset(value))
        keys = Keys({"kind": "hf", "source": str(value), "split": options[split]})
        config = options["dataset_config"] or next(iter(options["dataset_configs"] or ()), None)
        return Keys({**keys, **({"options.name": str(config)} if config is not None else {})})

    return convert


def held_out(value: Any, options: Options) -> Keys:
    keys = hub_dataset("dataset_test_split")(options["dataset_name"], options)
    return Keys({f"data.eval.{name}": each for name, each in keys.items()})


def training(value: Any, options: Options) -> Keys:
    section = "sft.train" if is_sft(options) else "data.train"
    keys = hub_dataset("dataset_train_split")(value, options)
    return Keys({f"{section}.{name}": each for name, each in keys.items()})


# Rewards


def has_reward_model(options: Options) -> bool:
    return flag(options["reward.reward_model.enable"]) or flag(options["reward_model.enable"])


def verl_reward_model(value: Any, options: Options) -> Keys:
    if not flag(value):
        return Keys()
    return Keys({"rollout.rewards.reward.model": "reward", "reward_models.reward.kind": "classifier"})


def has_verls_reward(options: Options) -> bool:
    """Whether verl's own rules score the responses."""
    named = options["reward.custom_reward_function.path"] or options["custom_reward_function.path"]
    return named is None and not has_reward_model(options)


def reward_file(*names: str) -> Convert:
    """A function of a Python file, whose name is another option, as package.module:function."""

    def convert(value: Any, options: Options) -> Keys:
        if value is None:
            return Keys()
        path = PurePath(str(value))
        parts = path.with_suffix("").parts
        elsewhere = path.is_absolute() or not all(part.isidentifier() for part in parts)
        if elsewhere:
            parts = (path.stem,)
        name = next((options[name] for name in names if name in options), "compute_score")
        function = f"{'.'.join(parts)}:{name}"
        if not _FUNCTION.fullmatch(function):
            raise Refused(f"{path.name} cannot be imported by its name; rename it")
        keys = Keys({"rollout.reward": function})
        if elsewhere:
            keys.lost = f"put {path.parent} on PYTHONPATH, or copy {path.name} to where the run starts"
        return keys

    return convert


# Names of reward functions that TRL and Open R1 have, and the built-in rewards that do the same.
_REWARDS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math", "accuracy": "math", "code": "code"}


def trl_rewards(value: Any, options: Options) -> Keys:
    """One reward function as `rollout.reward`, several as `rollout.rewards` with their weights."""
    names = [str(each) for each in listed(value, options)]
    weights = options["reward_weights"] or [1.0] * len(names)
    if not isinstance(weights, list) or len(weights) != len(names):
        raise Refused("reward_weights and reward_funcs are not equally many")
    found: dict[str, tuple[str, float]] = {}
    lost = []
    for name, weight in zip(names, weights, strict=True):
        bare = re.split(r"[:.]", name)[-1]
        # A function of the script is no module of its own; the others come from packages, or by a path of theirs.
        own = name.startswith("script:")
        function = None if own else _REWARDS.get(bare) or (_imported(name) if re.search(r"[:.]", name) else None)
        if function is None or bare in found or not weight > 0:
            lost.append(bare)
        else:
            found[bare] = function, float(weight)
    if len(found) == 1 and not lost:
        keys = Keys({"rollout.reward": next(iter(found.values()))[0]})
    else:
        keys = Keys({f"rollout.rewards.{name}.function": function for name, (function, _) in found.items()})
        keys.update({f"rollout.rewards.{name}.weight": weight for name, (_, weight) in found.items()})
    if lost:
        said = "move it to a module of its own, such as reward.py, and name it in rollout.reward: reward:NAME"
        keys.lost = f"{', '.join(lost)}: {said}; its signature works unchanged"
    if any(function == "math" for function, _ in found.values()):
        keys["data.columns.answer"] = "solution"
    return keys


def _imported(name: str) -> str | None:
    module, _, function = name.replace(":", ".").rpartition(".")
    reference = f"{module}:{function}"
    return reference if module and _FUNCTION.fullmatch(reference) else None


def nonzero_std(value: Any, options: Options) -> bool:
    if "nonzero_std" not in str(value):
        raise Refused(f"{value}: filters are not functions here; rollout.groups.drop_uniform drops equal rewards")
    return True


def slime_reward(value: Any, options: Options) -> Keys:
    if str(value) not in ("math", "deepscaler", "dapo"):
        raise Open(f"{value} has no counterpart: name a function of your own in rollout.reward")
    return Keys({"rollout.reward": "math"})


def slime_function(value: Any, options: Options) -> Keys:
    raise Open(
        f"{value} is called as f(args, sample): write it as f(completions, **columns), where a sample's label is the "
        "column `answer`, and name it in rollout.reward"
    )


# Algorithms


def advantage(**others: str) -> Convert:
    def convert(value: Any, options: Options) -> str:
        name = others.get(str(value), str(value))
        if name not in ADVANTAGES:
            raise Refused(f"{value} has no counterpart; megasync has {', '.join(ADVANTAGES)}")
        return name

    return convert


def loss(value: Any, options: Options) -> str:
    name = {"bypass_mode": "vanilla"}.get(str(value), str(value))
    if name not in LOSSES:
        raise Refused(f"{value} has no counterpart; megasync has {', '.join(LOSSES)}")
    return name


def rejection(value: Any, options: Options) -> str:
    names = {"seq_mean_k1": "sequence", "geometric": "sequence", "seq_sum_k1": "product", "sequence": "product"}
    names |= {"token_k1": "token", "token": "token"}
    if value is None or str(value) == "None":
        return "none"
    if str(value) not in names:
        raise Refused(
            f"{value} has no counterpart; megasync rejects by ratios, as seq_mean_k1, seq_sum_k1 and token_k1"
        )
    return names[str(value)]


def bounds(floor: str, cap: str, **more: Any) -> Convert:
    """Two bounds of a ratio as text, "0.5_2.0", or the upper one."""

    def convert(value: Any, options: Options) -> Keys:
        low, _, high = str(value).rpartition("_")
        try:
            keys = Keys({cap: float(high), **({floor: float(low)} if low else {})})
        except ValueError:
            raise Refused(f"{value} is neither a number nor two of the form 0.5_2.0") from None
        return Keys({**keys, **more}) if low else keys

    return convert


def is_method(value: Any, options: Options) -> Keys:
    """TRL's correction for the difference between trainer and server."""
    level, _, outside = str(value).partition("_")
    if level not in ("token", "sequence") or outside not in ("mask", "truncate"):
        raise Refused(f"{value} has no counterpart")
    correction = "product" if level == "sequence" else "token"
    treatment = "mask" if outside == "mask" else "cap"
    return Keys({"algorithm.correction": correction, "algorithm.correction_outside": treatment})


def trl_loss(value: Any, options: Options) -> Keys:
    name = str(value)
    aggregation = {"grpo": "sequence", "sapo": "sequence", "bnpo": "token", "dapo": "token", "cispo": "token"}
    aggregation["dr_grpo"] = "constant"
    if name not in aggregation:
        raise Refused(f"{name} has no counterpart")
    keys = Keys({"algorithm.aggregation": aggregation[name]})
    sequence = options["importance_sampling_level"] == "sequence"
    if name in ("sapo", "cispo") or sequence:
        keys["algorithm.loss"] = "gspo" if sequence else name
    return keys


def top_p(name: str) -> Convert:
    """Below 1 servers report which tokens were left, for which megasync needs a bound on their number."""

    def convert(value: Any, options: Options) -> Keys:
        keys = Keys({"rollout.sampling.top_p": value})
        if float(value) < 1 and (options[name] or -1) < 2:
            keys["rollout.sampling.top_k"] = 4096
        return keys

    return convert


def share_of(name: str) -> Convert:
    """A fraction of another option."""
    return lambda value, options: float(f"{float(value) * options.number(name):.10g}")


def warmup(steps: Callable[[Options], float]) -> Convert:
    """A fraction of the steps."""
    return lambda value, options: max(1, round(float(value) * steps(options))) if value else 0


def epochs(data: str, groups: Callable[[Any, Options], int], said: str) -> Convert:
    """Passes over the rows as steps, where the files are here and their rows can be counted."""

    def convert(value: Any, options: Options) -> Keys | int:
        if options[said] not in (None, -1):  # the number of steps, which comes first there too
            return Keys()
        paths = listed(options[data], options)
        counts = [count_rows(str(path)) for path in paths]
        if None in counts:
            missing = paths[counts.index(None)]
            raise Open(
                f"{value} passes over the rows: schedule.total_steps is rows x {value} / schedule.groups_per_step, and "
                f"{missing} cannot be counted here"
            )
        return max(1, int(sum(filter(None, counts)) * float(value)) // groups(None, options))

    return convert


def hub_epochs(value: Any, options: Options) -> Keys:
    if options["max_steps"] not in (None, -1):
        return Keys()
    raise Open(f"{value} passes over the rows: schedule.total_steps is rows x {value} / schedule.groups_per_step")


def count_rows(path: str) -> int | None:
    """The number of rows of a parquet or jsonl file; None if it is not here, or cannot be read."""
    file = Path(path).expanduser()
    try:
        if file.suffix == ".jsonl":
            with file.open("rb") as lines:
                return sum(bool(line.strip()) for line in lines)
        from pyarrow import parquet  # pyright: ignore[reportMissingImports] - an extra

        return parquet.ParquetFile(file).metadata.num_rows
    except (ImportError, OSError, ValueError, RuntimeError):  # no file or package, or nothing that it reads
        return None


# Sizes. Copies: the ranks that hold one copy of the model.


def divided(nodes: int, per_node: int, copies: int, experts: int, pipeline: int) -> tuple[int, int, bool]:
    """Devices of the trainer and of the servers, and whether they are the same, for a library that shares all of them.

    On one node they are. Of several nodes half go to each, if whole copies of the model, and of the ``experts`` ranks
    that have all experts of a stage, fit into it; otherwise each needs all.
    """
    world = nodes * per_node
    if nodes == 1:
        return world, world, True
    half = nodes // 2 * per_node
    fits = half and half % copies == 0 and half // pipeline % experts == 0
    return (half, world - half, False) if fits else (world, world, False)


def trainer_of(shares: Callable[[Options], tuple[int, int, bool]], copies: Callable[[Options], int]) -> Convert:
    return lambda value, options: quotient(
        shares(options)[0], copies(options), "ranks of the trainer, and tensor x pipeline x context ranks"
    )


def servers_of(shares: Callable[[Options], tuple[int, int, bool]], devices: Callable[[Options], int]) -> Convert:
    return lambda value, options: max(1, shares(options)[1] // devices(options))


def colocated(shares: Callable[[Options], tuple[int, int, bool]]) -> Convert:
    return lambda value, options: shares(options)[2]


_ACTOR = "actor_rollout_ref.actor"
_MG = f"{_ACTOR}.megatron"
_ROLLOUT = "actor_rollout_ref.rollout"


def is_megatron(options: Options) -> bool:
    named = options[f"{_ACTOR}.strategy"] == "megatron" or "megatron" in options.given.program
    return named or any(".actor.megatron." in name for name in options.given.options)


def is_asynchronous(options: Options) -> bool:
    return "fully_async" in options.given.program or any(
        name.startswith("async_training.") for name in options.given.options
    )


def is_synchronous(options: Options) -> bool:
    return not is_asynchronous(options)


def is_sft(options: Options) -> bool:
    return "sft" in options.given.program.lower()


def verl_copies(options: Options) -> int:
    if not is_megatron(options):
        return options.whole(f"{_ACTOR}.ulysses_sequence_parallel_size", 1)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    return math.prod(options.whole(f"{_MG}.{name}", 1) for name in names)


def verl_shares(options: Options) -> tuple[int, int, bool]:
    nodes, per_node = options.whole("trainer.nnodes"), options.whole("trainer.n_gpus_per_node")
    if is_asynchronous(options):
        servers = options.whole("rollout.nnodes", 1) * options.whole("rollout.n_gpus_per_node", 8)
        return nodes * per_node, servers, False
    names = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    tensor = options.whole(f"{_MG}.tensor_model_parallel_size", 1)
    experts = options.whole(f"{_MG}.{names[0]}", 1) * options.whole(f"{_MG}.{names[1]}", tensor)
    pipeline = options.whole(f"{_MG}.pipeline_model_parallel_size", 1)
    return divided(nodes, per_node, verl_copies(options), experts, pipeline)


def verl_server(options: Options) -> int:
    return options.whole(f"{_ROLLOUT}.tensor_model_parallel_size") * options.whole(
        f"{_ROLLOUT}.pipeline_model_parallel_size", 1
    )


def verl_devices(value: Any, options: Options) -> int:
    """GPUs of a node. In verl's asynchronous runs trainer and servers may each have a part of the same nodes."""
    trainer = options.whole("trainer.n_gpus_per_node")
    if not is_asynchronous(options):
        return trainer
    servers = options.whole("rollout.n_gpus_per_node", 8)
    shared = options["trainer.nnodes"] == options["rollout.nnodes"] and trainer + servers <= 8
    return trainer + servers if shared else max(trainer, servers)


def verl_groups(value: Any, options: Options) -> int:
    if is_asynchronous(options):
        return options.whole(f"{_ACTOR}.ppo_mini_batch_size") * options.whole("async_training.require_batches", 1)
    return options.whole("data.train_batch_size")


def verl_minibatches(value: Any, options: Options) -> int:
    if is_asynchronous(options):
        return options.whole("async_training.require_batches", 1)
    return quotient(
        options.number("data.train_batch_size"), options.number(f"{_ACTOR}.ppo_mini_batch_size"), "prompts of a batch"
    )


def verl_staleness(value: Any, options: Options) -> int:
    return math.ceil(float(value)) if is_asynchronous(options) else 0


def verl_total(options: Options) -> float:
    steps = options["trainer.total_training_steps"]
    if steps is not None:
        return options.number("trainer.total_training_steps")
    convert = epochs("data.train_files", verl_groups, "trainer.total_training_steps")
    return convert(options.number("trainer.total_epochs"), options)


def verl_steps(value: Any, options: Options) -> int:
    return max(1, int(value) // verl_groups(None, options))


def verl_samples(value: Any, options: Options) -> int:
    return options.whole(f"{_ROLLOUT}.n", options.whole("rollout.n", 4) if is_asynchronous(options) else 1)


def slime_copies(options: Options) -> int:
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size")
    return math.prod(options.whole(name, 1) for name in names)


def slime_shares(options: Options) -> tuple[int, int, bool]:
    nodes, per_node = options.whole("actor-num-nodes"), options.whole("actor-num-gpus-per-node")
    if flag(options["colocate"]):
        tensor = options.whole("tensor-model-parallel-size", 1)
        experts = options.whole("expert-model-parallel-size", 1) * options.whole("expert-tensor-parallel-size", tensor)
        pipeline = options.whole("pipeline-model-parallel-size", 1)
        return divided(nodes, per_node, slime_copies(options), experts, pipeline)
    return nodes * per_node, options.whole("rollout-num-gpus", nodes * per_node), False


def slime_sft_shares(options: Options) -> tuple[int, int, bool]:
    return options.whole("actor-num-nodes") * options.whole("actor-num-gpus-per-node"), 0, False


def slime_devices(value: Any, options: Options) -> int:
    """GPUs of a node: those of the trainer, unless servers have others on the same node."""
    given = options.whole("num-gpus-per-node", 0)
    if options.whole("actor-num-nodes") > 1 or flag(options["colocate"]):
        return max(given, options.whole("actor-num-gpus-per-node"))
    return given or 8


def slime_kl_in_reward(value: Any, options: Options) -> Keys:
    if not value:
        return Keys()
    return Keys({"algorithm.kl_coef": value, "algorithm.kl_in": "reward", "algorithm.kl_kind": "k1"})


def slime_server(options: Options) -> int:
    return options.whole("rollout-num-gpus-per-engine")


def slime_groups(value: Any, options: Options) -> int:
    return options.whole("rollout-batch-size")


def slime_minibatches(value: Any, options: Options) -> int:
    responses = options.number("rollout-batch-size") * options.number("n-samples-per-prompt")
    return quotient(responses, options.number("global-batch-size", int(responses)), "responses of a batch")


def slime_staleness(value: Any, options: Options) -> int:
    program = options.given.program + str(options["rollout-function-path"])
    return 1 if "async" in program and not flag(options["colocate"]) else 0


def slime_clip_high(value: Any, options: Options) -> float:
    return options.number("eps-clip-high", options["eps-clip"])


def slime_parallel(value: Any, options: Options) -> bool:
    return flag(value) and options.whole("tensor-model-parallel-size", 1) > 1


def verl_parallel(value: Any, options: Options) -> bool:
    return flag(value) and options.whole(f"{_MG}.tensor_model_parallel_size", 1) > 1


def trl_responses(options: Options) -> float:
    """Responses that TRL generates at once."""
    if (size := options["generation_batch_size"]) is not None:
        return float(size)
    per_device = options.number("per_device_train_batch_size") * options.number("num_processes")
    return per_device * options.number("steps_per_generation", options["gradient_accumulation_steps"])


def trl_groups(value: Any, options: Options) -> int:
    return quotient(
        trl_responses(options), options.number("num_generations"), "responses of a batch, and num_generations"
    )


def trl_minibatches(value: Any, options: Options) -> int:
    step = options.number("per_device_train_batch_size") * options.number("num_processes")
    return quotient(
        trl_responses(options), step * options.number("gradient_accumulation_steps"), "responses of a batch"
    )


def trl_rows(value: Any, options: Options) -> int:
    names = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_processes")
    return math.prod(options.whole(name) for name in names)


def is_async_trl(options: Options) -> bool:
    return "AsyncGRPO" in options.given.program


def trl_shares(options: Options) -> tuple[int, int, bool]:
    world = options.whole("num_processes")
    separate = is_async_trl(options) or (flag(options["use_vllm"]) and options["vllm_mode"] == "server")
    return (world, trl_server(options), False) if separate else (world, world, True)


def trl_server(options: Options) -> int:
    return options.whole("vllm_tensor_parallel_size")


def trl_corrects(options: Options) -> bool:
    """Whether TRL corrects for the difference between trainer and server."""
    wanted = flag(options["use_vllm"]) and flag(options["vllm_importance_sampling_correction"])
    return wanted and not is_async_trl(options)


def trl_steps(options: Options) -> float:
    if options["max_steps"] in (None, -1):
        raise Open("it is a share of the steps, whose number is not in the file")
    return options.number("max_steps")


def trl_decay(value: Any, options: Options) -> str:
    name = value or ("constant" if is_async_trl(options) else "linear")
    courses = words(constant="constant", constant_with_warmup="constant", linear="linear", cosine="cosine")
    return courses(str(name).removesuffix("_with_min_lr"), options)


def trl_clip_high(value: Any, options: Options) -> float:
    return options.number("epsilon_high", options["epsilon"])


def lora_targets(value: Any, options: Options) -> list[str]:
    """Names of projections; Megatron's names stand for those of several."""
    fused = {
        "linear_qkv": ["q_proj", "k_proj", "v_proj"],
        "linear_proj": ["o_proj"],
        "linear_fc1": ["gate_proj", "up_proj"],
        "linear_fc2": ["down_proj"],
    }
    names = listed(value, options)
    if names in (["all-linear"], ["all_linear"], [None]):
        return []
    found = [name for each in names for name in fused.get(str(each), [str(each).strip(" ,\"'")])]
    # Megatron computes these as one projection.
    for together in fused.values():
        if set(together) & set(found):
            found += [name for name in together if name not in found]
    return found


def save_steps(value: Any, options: Options) -> int:
    if float(value) < 1:
        raise Refused("it is a share of the steps; checkpoint.every_steps counts them")
    return int(value)
