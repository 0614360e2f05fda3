"""Responses: to held-out prompts before and after training; recorded ones, a group side by side, one token by token."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megasync.observe.rollouts import FOLDER, NO_SAMPLE, IndexRow, Response
from megasync.observe.samples import before_and_after
from megasync.trajectory import ANSWER
from megasync.watch import units
from megasync.watch.decoder import decoder_of
from megasync.watch.document import Cell, Number, Section, Table, Text, Tokens, Verbatim, fixed, number, shortened
from megasync.watch.responses import SHADINGS, Decoder, about, read, turns, visible, writer_of
from megasync.watch.run_folder import RunFolder

# Held-out prompts that are shown.
PROMPTS = 8
# Responses of the group, characters of each and of the prompt, and tokens of the response that is shown token by token:
# together below a megabyte, however long the responses are.
MEMBERS, CHARACTERS, PROMPT_CHARACTERS, TOKENS = 16, 600, 4_000, 1_000
# How its tokens are coloured.
COLOURED_BY = ("log-prob", "trainer/server gap")


def samples(run: RunFolder) -> Section:
    section = Section("Responses before and after training")
    pairs = before_and_after(run.answers)[:PROMPTS]
    rows: list[Sequence[Cell]] = [
        (
            shortened(early.prompt, CHARACTERS),
            shortened(early.text, CHARACTERS),
            fixed(early.reward, 2),
            shortened(late.text, CHARACTERS),
            fixed(late.reward, 2),
        )
        for early, late in pairs
    ]
    if pairs:
        first, last = min(early.step for early, _ in pairs), max(late.step for _, late in pairs)
        headings = ("Prompt", f"Step {first}", "Reward", f"Step {last}", "Reward ")
        caption = "The most likely responses to the same held-out prompts."
        section.add(Table(caption, headings, rows, texts=(headings[0], headings[1], headings[3])))
    return section


def responses(run: RunFolder) -> Section:
    section = Section("Recorded responses")
    if run.supervised:
        return section
    index = run.rollouts
    if not len(index):
        section.add(Text(f"The run recorded no responses: {FOLDER}/ is missing or empty (observe.rollouts)."))
        return section
    groups: defaultdict[str, list[IndexRow]] = defaultdict(list)
    for row in index.rows:
        groups[row.uid].append(row)
    trained = {uid: rows for uid, rows in groups.items() if not rows[0].dropped}
    section.add(
        Text(
            f"Recorded are {units.counted(len(index), 'response')} of {units.counted(len(groups), 'group')}, of which "
            f"{len(trained):,} were trained and {len(groups) - len(trained):,} dropped: as large a sample as "
            "observe.rollouts sets, independent of lengths and rewards."
        )
    )
    if trained:
        decoder, problem = decoder_of(run)
        if problem:
            section.add(Text(problem))
        uid = max(trained, key=lambda uid: (_differ(trained[uid]), max(row.time for row in trained[uid])))
        _add_group(section, run, uid, decoder)
    section.add(_dropped([rows for rows in groups.values() if rows[0].dropped]))
    return section


def _differ(group: Sequence[IndexRow]) -> bool:
    return len({row.reward for row in group}) > 1


def _add_group(section: Section, run: RunFolder, uid: str, decoder: Decoder) -> None:
    """The group, and of its responses the one with the highest reward."""
    group = run.rollouts.group(uid)
    rule = (
        "The newest group whose rewards differ"
        if _differ(group)
        else "The newest group; no group has rewards that differ"
    )
    members = [read(run.rollouts, row) for row in group[:MEMBERS]]
    prompt = next(
        (response.prompt_ids for response in members if isinstance(response, Response)), np.zeros(0, np.int32)
    )
    tokens = units.counted(len(prompt), "token")
    section.add(
        Text(
            f"{rule}: {uid}, trained in step {group[0].step} from version {group[0].version}. Its prompt of {tokens}:"
        ),
        Verbatim(shortened(decoder.text(prompt), PROMPT_CHARACTERS)),
    )
    rows: list[Sequence[Cell]] = [
        (
            Number(row.sample, str(row.sample)),
            fixed(row.reward),
            fixed(row.advantage),
            Number(row.tokens, f"{row.tokens:,}"),
            Number(row.staleness, str(row.staleness)),
            number(row.gap),
            row.finish_reason,
            shortened(
                response if isinstance(response, str) else response.text or decoder.text(response.ids), CHARACTERS
            ),
        )
        for row, response in zip(group, members, strict=False)
    ]
    more = f" The first {MEMBERS} of {len(group)}." if len(group) > MEMBERS else ""
    headings = ("Sample", "Reward", "Advantage", "Tokens", "Staleness", "Gap", "Ended by", "Response")
    caption = f"Group {uid}. The gap is the mean |log-prob gap| of trainer and servers, in nats.{more}"
    section.add(Table(caption, headings, rows, texts=headings[-1:]))
    pairs = [(row, response) for row, response in zip(group, members, strict=False) if isinstance(response, Response)]
    if pairs:
        best = max(pairs, key=lambda pair: (pair[0].reward is not None, pair[0].reward or 0.0))
        section.add(_token_by_token(*best, decoder))


def _token_by_token(row: IndexRow, response: Response, decoder: Decoder) -> Tokens:
    """The whole response, or beginning and end of one of more than `TOKENS`."""
    count = len(response.ids)
    places, pieces, note = np.arange(count), decoder.pieces(response.ids[:TOKENS]), ""
    if count > TOKENS:
        half = TOKENS // 2
        places = np.concatenate([places[:half], places[-half:]])
        pieces = [*decoder.pieces(response.ids[:half]), *decoder.pieces(response.ids[-half:])]
        pieces[half - 1] += " … "
        note = f" Its first and its last {half} of {count:,} tokens."
    versions = response.versions.expand()
    turn_of = [turn for turn in turns(response) for _ in range(turn.start, turn.end)]
    answered = [turn_of[at].role == ANSWER for at in places.tolist()]
    made = {name: SHADINGS[name](response) for name in COLOURED_BY}
    return Tokens(
        f"Response {row.sample}, which has the highest reward of the group, token by token.{note}",
        [visible(piece) for piece in pieces],
        [
            about(response, at, versions) + ("" if is_answer else f" · {writer_of(turn_of[at])}")
            for at, is_answer in zip(places.tolist(), answered, strict=True)
        ],
        answered,
        {
            name: replace(shading, shades=shading.shades[places])
            for name, shading in made.items()
            if shading is not None
        },
    )


def _dropped(groups: Sequence[Sequence[IndexRow]]) -> Table:
    """Recorded groups without a step, by reason."""
    of_groups = Counter(group[0].dropped for group in groups)
    of_responses = Counter(row.dropped for group in groups for row in group if row.sample != NO_SAMPLE)
    rows = [
        (reason, Number(count, f"{count:,}"), Number(of_responses[reason], f"{of_responses[reason]:,}"))
        for reason, count in of_groups.most_common()
    ]
    return Table("Recorded groups that were dropped, by reason.", ("Reason", "Groups", "Responses"), rows)
