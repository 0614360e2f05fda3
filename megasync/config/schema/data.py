"""The model, the datasets, and how a row becomes a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from megasync.config.limits import (
    ANSWER,
    AT_LEAST_ONE,
    COLUMNS,
    CURRICULUM,
    DATASET,
    DTYPE,
    NAMES,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    Choice,
)
from megasync.config.rules import at_least, at_most, excludes, key, needs, none_of, section, unused_without, when

# Why a resumed run cannot change keys that order the prompts.
ORDER = "the uid of every prompt is a row number in the order that it determines; start a new run"


@dataclass
class ModelConfig:
    """The model that is trained and served."""

    # Folder with a Hugging Face config.json, safetensors (unquantized, block FP8, or MXFP4 of gpt-oss) and tokenizer
    # (`megasync fetch` makes two small ones), or a model's name on a hub, such as Qwen/Qwen3-0.6B: docs/models.md.
    path: str = key(
        MISSING,
        PATH,
        fixed="the run's tokens and reference weights come from that folder; if it was moved, create a symbolic link "
        "at its old path",
    )
    # config.json that `megasync plan` reads if the model folder is not on this machine.
    config: str | None = key(None, PATH)
    # Dtype of computation, storage and serving: float32 or bfloat16. On GPUs bfloat16 keeps float32 master weights.
    dtype: str = key(
        "bfloat16",
        DTYPE,
        NAMES,
        fixed="the checkpoint's weights have it; export the newest checkpoint and start a new run from that",
        megatron="params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype fp32_residual_connection",
    )


@dataclass
class DatasetConfig:
    """A dataset. Both are null by default: rows may also come from Python, and `eval.sets` adds held-out sets."""

    # digits (procedural), reasoning_gym, verifiers, jsonl, parquet, hf (a `datasets` folder or hub name), or harbor
    # (folders of tasks).
    kind: str = key(MISSING, DATASET)
    # File or folder of jsonl, parquet, hf and harbor datasets, or owner/name[@revision] of an hf dataset; the task's
    # name for digits and reasoning_gym, the taskset's for verifiers.
    source: str = MISSING
    # Split of the dataset. The generated tasks have `train` and `test`, which share no row.
    split: str = "train"
    # Rows to generate (procedural kinds) or to keep (all others); null keeps all.
    size: int | None = key(None, AT_LEAST_ONE)
    # Seed of generated rows.
    seed: int = key(0, NOT_NEGATIVE)
    # digits: length; reasoning_gym, verifiers: the task's own options; hf: arguments of `datasets.load_dataset` (name,
    # revision).
    options: dict[str, Any] = key(
        dict, excludes(".kind", "jsonl", "parquet", "harbor", because="only other kinds take options")
    )


@dataclass
class PromptConfig:
    """How a row becomes a prompt."""

    # raw: the template below, tokenized as plain text. chat: the tokenizer's chat template.
    format: str = key("raw", Choice("raw", "chat"))
    # Python format string over the row's columns; the default is the prompt column itself.
    template: str = key("{prompt}", COLUMNS)
    # Variables of the chat template, for prompts and supervised rows; empty for those of rollout.chat.template_options.
    template_options: dict[str, Any] = key(dict)
    # Text before the prompt: a system message (chat), or a preamble (raw).
    system: str = ""
    # Number of solved examples before each raw prompt, taken from the first rows of the training set.
    examples: int = key(
        0,
        NOT_NEGATIVE,
        needs(".format", "raw", because="examples precede raw prompts"),
        excludes("data.sets", because="examples are the first rows of data.train"),
        # They are removed from the training rows.
        fixed=ORDER,
    )
    # Format of a solved example.
    example_template: str = key("{prompt} {answer}\n\n", COLUMNS)
    # Maximum prompt length in tokens. Longer prompts are not truncated: they are an error at start.
    max_tokens: int = key(1024, AT_LEAST_ONE)


@dataclass
class TrainSetConfig:
    """One of several training sets, under the name that it has in the metrics: docs/training_sets.md."""

    data: DatasetConfig = field(default_factory=DatasetConfig)
    # Its share of the prompts, relative to the others'. Whole numbers are exact: with 3 and 1, each four prompts in a
    # row are three of the one set and one of the other.
    weight: float = key(1.0, POSITIVE)


@dataclass
class DataConfig:
    """Where prompts come from."""

    train: DatasetConfig | None = section(None, fixed=ORDER)
    # Several training sets instead of `train`, by names of your choice. Their rows get the column `train_set`.
    sets: dict[str, TrainSetConfig] = key(
        dict, NAMES, excludes(".train", because="both name training rows"), fixed=ORDER
    )
    eval: DatasetConfig | None = None
    # Columns by the names that megasync looks for, such as {prompt: question, answer: solution}; a row needs one of the
    # two names. A name may lead into a column: {answer: reward_model.ground_truth}.
    columns: dict[str, str] = key(dict)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    # Which prompts are left out by the rewards of their earlier epochs: by_success, or `package.module:function`; null
    # leaves out none. docs/training_sets.md#curriculum.
    curriculum: str | None = key(None, CURRICULUM)
    # Options of the curriculum, by name.
    curriculum_options: dict[str, Any] = key(dict, unused_without(".curriculum"))
    # Shuffle the training prompts anew in each epoch.
    shuffle: bool = key(True, fixed=ORDER)


@dataclass
class SftConfig:
    """The supervised training of `megasync sft`. `megasync train` does not read it."""

    # Rows with a conversation (a column `messages`), or with a prompt and an answer.
    train: DatasetConfig | None = key(
        None, when(none_of(None), needs("trainer.minibatches", 1), needs("data.prompt.examples", 0))
    )
    # Held-out rows of the same form, whose loss is computed before the first step, at intervals, and after the last.
    validation: DatasetConfig | None = None
    # Column with the answer to a row's prompt. `data.prompt` says how the prompt is written.
    answer: str = "answer"
    # How an answer is written. After a raw prompt that ends with a word, " {answer}" is the natural continuation.
    answer_template: str = key("{answer}", ANSWER)
    # Passes over the training rows, each in another order. `schedule.total_steps` is not read.
    epochs: int = key(1, AT_LEAST_ONE)
    # Rows of an optimizer step.
    rows_per_step: int = key(32, AT_LEAST_ONE, at_least("trainer.data_parallel", because="each rank needs a row"))
    # Maximum length of a row in tokens; null for the model's context. Longer rows are an error at start.
    max_tokens: int | None = key(
        None,
        AT_LEAST_ONE,
        at_most("trainer.tokens_per_microbatch * trainer.context_parallel", where={"trainer.pad_microbatches": True}),
        at_most("model's max_position_embeddings"),
    )
    # Leave longer rows out instead, and say how many.
    drop_long_rows: bool = False
    # Steps between two validations; 0 for none between the first and the last.
    validate_every_steps: int = key(50, NOT_NEGATIVE)
