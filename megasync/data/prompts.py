"""The prompts of a run: rows rendered to token ids, and served in an order that can be resumed exactly.

Invariant of rendering: every prompt is non-empty, has at most `prompt.max_tokens` tokens, and contains only ids of the
model's vocabulary. `Renderer.prompts` checks this for the whole dataset before anything starts. Special tokens come
from a template, never from a row (`OutsideText`).

Invariant of the order: at any point of a run, the prompts that were admitted, those that `state()` lists as drawn but
not admitted, and those that the cursor has not reached are together every prompt of every epoch exactly once. Restoring
a state and requeueing the unfinished prompts therefore loses and repeats nothing. The same holds for restoring any
earlier state and skipping everything that was admitted, as a run with its ledger does. `_skip` guarantees this: the
cursor passes over uids ahead of it that were admitted or requeued.
"""

from __future__ import annotations

import logging
import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import accumulate
from math import gcd, lcm
from typing import Any, TypeVar

from megasync.config.schema import PromptConfig
from megasync.data.chat_template import ChatTemplate
from megasync.data.messages import Message, as_messages, as_tools
from megasync.data.outside_text import OutsideText, plain
from megasync.data.rows import fill, is_messages, place
from megasync.errors import DataError
from megasync.trajectory import Prompt

log = logging.getLogger(__name__)

T = TypeVar("T")


def split_examples(
    rows: Sequence[dict[str, Any]], config: PromptConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(solved examples, training rows): the first `examples` rows are shown in prompts, so they are not trained on."""
    if config.examples >= len(rows):
        raise DataError(
            f"data.prompt.examples={config.examples} leaves nothing of {len(rows)} training rows; lower it or add rows"
        )
    return list(rows[: config.examples]), list(rows[config.examples :])


class Renderer:
    """Renders rows to token ids. `tokenizer` is a Hugging Face tokenizer; ids must be below `vocab_size`."""

    def __init__(
        self, tokenizer: Any, config: PromptConfig, vocab_size: int, examples: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        if len(examples) != config.examples:
            raise DataError(f"data.prompt.examples={config.examples}, but {len(examples)} solved rows were given")
        if config.format == "chat" and not getattr(tokenizer, "chat_template", None):
            raise DataError(
                f"data.prompt.format=chat, but the tokenizer {tokenizer.name_or_path!r} has no chat template; use "
                f"data.prompt.format=raw or a model with a chat template"
            )
        if config.format == "chat" and config.examples:
            raise DataError("data.prompt.examples requires data.prompt.format=raw; change one of the two")
        self._template = ChatTemplate(tokenizer, config.template_options) if config.format == "chat" else None
        self._config = config
        self._vocab_size = vocab_size
        self._outside = OutsideText(tokenizer)
        shown = "".join(_example(config, self._outside, row, n) for n, row in enumerate(examples))
        self._preamble = config.system + shown

    @property
    def chat(self) -> bool:
        return self._template is not None

    def text(self, row: Mapping[str, Any]) -> str:
        """The prompt text as the model sees it, including special tokens of the chat template."""
        return plain(self._guarded(row))

    def _guarded(self, row: Mapping[str, Any]) -> str:
        if self._template is not None:
            messages = self._template.guard(self.messages(row))
            return self._template.render(messages, as_tools(row.get("tools")), answer=True)
        if is_messages(row["prompt"]):
            raise DataError("a row's prompt is a list of chat messages; set data.prompt.format=chat")
        return self._preamble + fill("data.prompt.template", self._config.template, self._outside.guard(row))

    def messages(self, row: Mapping[str, Any]) -> list[Message]:
        """The prompt as chat messages (`data/messages.py`), the system message first. Raises DataError."""
        system = [{"role": "system", "content": self._config.system}] if self._config.system else []
        prompt = row["prompt"]
        if not is_messages(prompt):
            prompt = [{"role": "user", "content": fill("data.prompt.template", self._config.template, row)}]
        return [*system, *as_messages(prompt)]

    def prompt_ids(self, row: Mapping[str, Any]) -> list[int]:
        """Token ids, [tokens]. Raises DataError for an empty prompt and for ids outside the vocabulary."""
        # A chat template writes its own special tokens; for plain text the tokenizer adds them.
        ids = self._outside.encode(self._guarded(row), add_special_tokens=not self.chat)
        if not ids:
            raise DataError(f"the prompt {row['prompt']!r:.80} has no tokens; a prompt needs at least one")
        if wrong := [token for token in ids if not 0 <= token < self._vocab_size]:
            raise DataError(
                f"the prompt {row['prompt']!r:.80} has token id {wrong[0]}, outside the model's vocabulary of "
                f"{self._vocab_size}; the tokenizer does not belong to this model"
            )
        return ids

    def prompts(self, rows: Sequence[Mapping[str, Any]], name: str = "the prompts") -> list[list[int]]:
        """Token ids of every row of the dataset `name`.

        Raises DataError that names the row, and for prompts that are too long their number and the first.
        """
        rendered = [_placed(self.prompt_ids, row, number, name) for number, row in enumerate(rows)]
        if marked := sum(self._outside.guard(row["prompt"]) is not row["prompt"] for row in rows):
            log.warning(
                "%d of %d prompts contain names of special tokens, which are encoded as text; put special tokens "
                "that a prompt needs into data.prompt.template",
                *(marked, len(rows)),
            )
        limit = self._config.max_tokens
        if long := [number for number, ids in enumerate(rendered) if len(ids) > limit]:
            first = long[0]
            raise DataError(
                f"{len(long)} of {len(rows)} prompts are longer than data.prompt.max_tokens={limit}; the first is "
                f"{place(rows[first], first)} with {len(rendered[first])} tokens: {rows[first]['prompt']!r:.80}. Raise "
                f"the limit or remove those rows"
            )
        return rendered


def _example(config: PromptConfig, outside: OutsideText, row: Mapping[str, Any], number: int) -> str:
    if row.get("answer") is None:
        raise DataError(
            f"data.prompt.examples={config.examples}, but training {place(row, number)} has no answer to show"
        )
    write = partial(fill, "data.prompt.example_template", config.example_template)
    return _placed(lambda row: write(outside.guard(row)), row, number)


def _placed(
    render: Callable[[Mapping[str, Any]], T], row: Mapping[str, Any], number: int, name: str = "the prompts"
) -> T:
    """Renders a row of the dataset `name`. A DataError says which row it is."""
    try:
        return render(row)
    except DataError as error:
        raise DataError(f"{place(row, number, name)}: {error}") from error.__cause__


def render_rows(rows: Sequence[dict[str, Any]], renderer: Renderer, name: str = "the prompts") -> list[Prompt]:
    """Prompts for evaluation, with the row's index as uid. `columns` has all of the row's columns.

    `name` identifies the dataset in errors.
    """
    return [
        Prompt(str(number), ids, _columns(row, renderer))
        for number, (row, ids) in enumerate(zip(rows, renderer.prompts(rows, name), strict=True))
    ]


class PromptSource:
    """Infinite epochs over the rows. Every uid is "<epoch>:<row>", so no uid repeats within a run.

    With several ``sets``, given as (number of rows, weight) in the order of the rows, each has epochs of its own, and
    is drawn from according to its weight (`Mixture`).

        source = PromptSource(rows, renderer, shuffle=True, seed=0)
        prompt = source.next()           # drawn, but not admitted: state() still lists it
        source.admitted(prompt.uid)      # from here on the buffer is responsible for it

    The constructor renders all rows, so an unusable prompt raises DataError before the run starts.
    """

    def __init__(
        self,
        rows: Sequence[dict[str, Any]],
        renderer: Renderer,
        shuffle: bool,
        seed: int,
        sets: Sequence[tuple[int, float]] | None = None,
    ) -> None:
        """Raises DataError without rows."""
        if not rows:
            raise DataError("a prompt source needs at least one row")
        sets = sets or [(len(rows), 1.0)]
        self._sizes = [size for size, _ in sets]
        self._firsts = [0, *accumulate(self._sizes[:-1])]
        self._mixture = Mixture([weight for _, weight in sets])
        self._rendered = renderer.prompts(rows, "the training prompts")
        self._columns = [_columns(row, renderer) for row in rows]
        self._shuffle = shuffle
        self._seed = seed
        # Prompts that the cursor has passed.
        self._number = 0
        # The row numbers of an epoch of each set, and which epoch.
        self._orders: dict[int, tuple[int, list[int]]] = {}
        self._queue: deque[str] = deque()
        self._drawn: dict[str, None] = {}
        self._skip: set[str] = set()

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rendered)

    def next(self) -> Prompt:
        """The next prompt: requeued prompts first, then the rest of the current epoch, then the next epoch."""
        uid = self._queue.popleft() if self._queue else self._advance()
        self._drawn[uid] = None
        return self.get(uid)

    def admitted(self, uid: str) -> None:
        """Records that the buffer now owns this prompt: it is finished, dropped with a reason, or listed as live."""
        self._drawn.pop(uid, None)

    def get(self, uid: str) -> Prompt:
        """The prompt with this uid, to generate it again. Raises DataError when the dataset has no such row."""
        row = self._split(uid)[1]
        return Prompt(uid, list(self._rendered[row]), self._columns[row])

    def state(self) -> dict[str, Any]:
        """The state of the source, as plain JSON values."""
        return {
            "rows": len(self),
            "epoch": self._number // len(self),
            "position": self._number % len(self),
            "waiting": [*self._drawn, *self._queue],
            "skip": sorted(self._skip),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a state. Raises DataError when the state belongs to a dataset of another size."""
        if state["rows"] != len(self):
            raise DataError(
                f"the checkpoint's cursor is over {state['rows']} rows, the dataset has {len(self)}; resume with the "
                f"dataset that the run was started with"
            )
        self._number = state["epoch"] * len(self) + state["position"]
        self._queue = deque(state["waiting"])
        self._drawn = {}
        self._skip = set(state["skip"])

    def requeue(self, uids: Iterable[str]) -> None:
        """Serves these uids before any new prompt, in the given order. Uids that already wait are not queued twice."""
        waiting = {*self._queue, *self._drawn}
        fresh = [uid for uid in dict.fromkeys(uids) if uid not in waiting]
        self._skip.update(self._ahead(fresh))
        self._queue.extendleft(reversed(fresh))

    def skip(self, uids: Iterable[str]) -> None:
        """Never serves these uids again, because they were admitted before. Raises DataError for an unknown row."""
        admitted = set(uids)
        self._queue = deque(uid for uid in self._queue if uid not in admitted)
        self._skip.update(self._ahead(admitted))

    def _advance(self) -> str:
        while True:
            chosen, draw = self._mixture.at(self._number)
            epoch, position = divmod(draw, self._sizes[chosen])
            uid = f"{epoch}:{self._order_of(chosen, epoch)[position]}"
            self._number += 1
            if uid not in self._skip:
                return uid
            self._skip.remove(uid)

    def _ahead(self, uids: Iterable[str]) -> list[str]:
        """The uids that the cursor has not reached yet."""
        drawn = zip(self._mixture.drawn(self._number), self._sizes, strict=True)
        cursors = [divmod(draws, size) for draws, size in drawn]
        rests = [{*self._order_of(each, epoch)[position:]} for each, (epoch, position) in enumerate(cursors)]
        ahead: list[str] = []
        for uid in uids:
            epoch, row = self._split(uid)
            of = bisect_right(self._firsts, row) - 1
            current = cursors[of][0]
            if epoch > current or (epoch == current and row in rests[of]):
                ahead.append(uid)
        return ahead

    def _order_of(self, chosen: int, epoch: int) -> list[int]:
        """The rows of an epoch of a set, in the order in which they are drawn."""
        cached, order = self._orders.get(chosen, (-1, []))
        if cached == epoch:
            return order
        first, size = self._firsts[chosen], self._sizes[chosen]
        order = list(range(first, first + size))
        if self._shuffle:
            seed = f"{self._seed}:{epoch}" if len(self._sizes) == 1 else f"{self._seed}:{chosen}:{epoch}"
            random.Random(seed).shuffle(order)
        self._orders[chosen] = (epoch, order)
        return order

    def _split(self, uid: str) -> tuple[int, int]:
        try:
            epoch, row = (int(part) for part in uid.split(":"))
        except ValueError:
            raise DataError(f'{uid!r} is not a prompt uid ("<epoch>:<row>")') from None
        if epoch < 0 or not 0 <= row < len(self):
            raise DataError(f"uid {uid!r} names a row that the dataset of {len(self)} rows does not have")
        return epoch, row


def _columns(row: dict[str, Any], renderer: Renderer) -> dict[str, Any]:
    return {**row, "messages": renderer.messages(row)} if renderer.chat else dict(row)


# Weights are ratios of whole numbers up to this one, and a cycle is at most so many draws.
FINEST = 1000
LONGEST = 100_000


class Mixture:
    """From which of several sets each prompt of a run is drawn: a function of the number of prompts drawn before.

    So shares are exact from the first prompt on, and a resumed run continues them without any state of its own. Draws
    go through cycles. Whole weights without a common divisor are the draws of each set in a cycle.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises DataError for weights whose ratio is too fine."""
        parts = [Fraction(weight).limit_denominator(FINEST) for weight in weights]
        scale = lcm(*(part.denominator for part in parts))
        quotas = [int(part * scale) for part in parts]
        common = gcd(*quotas)
        if not common or 0 in quotas or sum(quotas) // common > LONGEST:
            raise DataError(
                f"weights {', '.join(f'{weight:g}' for weight in weights)} are too far apart or too fine: they must "
                f"be the shares of at most {LONGEST} draws; round them"
            )
        self.quotas = [quota // common for quota in quotas]
        # (set, its earlier draws in the cycle) of each draw of a cycle, and the draws of all sets before it.
        self._cycle: list[tuple[int, int]] = []
        self._before: list[tuple[int, ...]] = []
        drawn, total = [0] * len(weights), sum(self.quotas)
        for number in range(1, total + 1):
            self._before.append(tuple(drawn))
            # Draw k of a set has a window: from where the set's share exceeds k to where it reaches k + 1. To choose
            # the window that ends first keeps all of them (as for periodic jobs on one processor), so each set stays
            # within a draw of its share. Choosing the set that is furthest behind does not, from four sets on.
            open_ones = (each for each, quota in enumerate(self.quotas) if drawn[each] * total < quota * number)
            chosen = min(open_ones, key=lambda each: -(-(drawn[each] + 1) * total // self.quotas[each]))
            self._cycle.append((chosen, drawn[chosen]))
            drawn[chosen] += 1

    def at(self, number: int) -> tuple[int, int]:
        """The set of a draw, and the number of that set's draws before it. ``number`` counts from 0."""
        cycle, place = divmod(number, len(self._cycle))
        chosen, earlier = self._cycle[place]
        return chosen, cycle * self.quotas[chosen] + earlier

    def drawn(self, number: int) -> list[int]:
        """The draws of each set among the first ``number``."""
        cycle, place = divmod(number, len(self._cycle))
        return [cycle * quota + now for quota, now in zip(self.quotas, self._before[place], strict=True)]
