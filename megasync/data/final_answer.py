"""Which text of a response is its answer, and which text of a column is the reference.

Invariant: reasoning is never the answer, nor is anything that a length limit may have cut. `final_answer` guarantees
both, for the default reward, for `math` and for judges.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from megasync.errors import DataError

# The finish reason of a response that the length limit ended.
CUT_OFF = "length"

# How models mark their reasoning: what opens it, and what closes it.
_REASONING = [
    (f"<{name}>", f"</{name}>")
    for name in ("think", "thinking", "thought", "thoughts", "reasoning", "reflection", "scratchpad", "seed:think")
] + [
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<unused94>thought", "<unused95>"),
    ("<|channel>thought", "<channel|>"),
    ("<mm:think>", "</mm:think>"),
    ("<|thinking|>", "<|/thinking|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<start_working_out>", "<end_working_out>"),
    ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("Here is my thought process:", "Here is my response:"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
]
_REASONING_MARK = re.compile(
    f"(?P<opening>{'|'.join(re.escape(opening) for opening, _ in _REASONING)})"
    f"|{'|'.join(re.escape(closing) for _, closing in _REASONING)}",
    re.IGNORECASE,
)
# gpt-oss's channels in a text without special tokens: analysisWe add ...assistantfinal72.
_BARE_CHANNEL = re.compile(r"\Aanalysis(?=[A-Z])(?:.*assistantfinal)?", re.DOTALL)

# Marks around an answer, which may hold a box or a sentence in turn.
_TAGS = [
    (re.compile(re.escape(opening), re.IGNORECASE), re.compile(re.escape(closing), re.IGNORECASE))
    for opening, closing in (
        ("<answer>", "</answer>"),
        ("<final_answer>", "</final_answer>"),
        ("<solution>", "</solution>"),
        ("<|begin_of_solution|>", "<|end_of_solution|>"),
        ("<|begin_of_box|>", "<|end_of_box|>"),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    )
]
_BOX = re.compile(r"(?:\\(?:begin)?(?:boxed|fbox|framebox)(?![A-Za-z])|(?<![\\A-Za-z])boxed(?=\{))\s*")
_BARE_CONTENT = re.compile(r"[^\s{}$.,;\\]+")
# A formula on a line of its own, between the lines that open and close it.
_DISPLAY = re.compile(
    r"(?:\\\[|\$\$|\\begin\{(?:align|equation|gather)\*?\})[ \t]*\n[ \t]*([^\n]{1,400}?)[ \t]*\n[ \t]*"
    r"(?:\\\]|\$\$|\\end\{(?:align|equation|gather)\*?\})"
)
# What stands between two boxes that are one answer: x=\boxed{3} or x=\boxed{5}.
_BETWEEN_BOXES = re.compile(
    r"(?:\s|\$|\\[,;:()\[\] ]|\\q?quad|\w\s*=)*(?:,|;|\b(?:and|or)\b|\\text\{\s*(?:and|or)\s*\})+"
    r"(?:\s|\$|\\[,;:()\[\] ]|\\q?quad|\band\b|\bor\b|\w\s*=)*",
    re.IGNORECASE,
)
_BETWEEN_LONGEST = 60
_HASHES = re.compile(r"^[ \t]*####[ \t]*(\S[^\n]*)$", re.MULTILINE)
_NOUN = r"(?:ans(?:wer)?|(?:correct|right|best)\s+(?:option|choice|statement))"
# The same in other languages, with and without spaces between words, and their verbs.
_SPACED = (
    r"(?:Antwort|R[ée]ponse|Respuesta|Risposta|Resposta|Antwoord|Svar|Odpowied[źz]|Odpov[ěe]ď|Cevap|Yan\u0131t|Jawaban|Jibu"
    r"|Idahun|Ответ|Відповідь|Đáp\s+án|الإجابة|الجواب|উত্তর|उत्तर|คำตอบ|సమాధానం)"
)
_UNSPACED = r"(?:答案|正确选项|正確選項|答え|答|回答|解答|正解|정답|답변|답)"
_VERBS = r"(?:ist|lautet|est|es|è|é|is|är|er|adalah|ni|to)"
# A line that begins with it, or a heading above it, states the answer; in a sentence it needs a verb.
_ANSWER_LINE = re.compile(
    rf"^[^\w\n]*(?:(?:(?:the|my|so|thus|final|correct)[ \t]+)*{_NOUN}"
    rf"|(?:[^\W\d]+[ \t]+){{0,2}}{_SPACED}(?:[ \t]+[^\W\d]+){{0,2}}|[^\W\d]{{0,8}}{_UNSPACED})"
    rf"[\"'*_ \t\u00a0\u202f]*(?:[:=\uff1a]|[-\u2013\u2014][ \t])[*_ \t]*(?:\n\s*)?(\S[^\n]*)"
    rf"|^(?:#+|\*\*|__)[ \t]*(?:final[ \t]+)?answer[ \t]*:?(?:\*\*|__)?[ \t]*\n\s*(\S[^\n]*)",
    re.IGNORECASE | re.MULTILINE,
)
_ANSWER_SENTENCE = re.compile(
    rf"(?:\b{_NOUN}\b[^\n.:=]{{0,40}}?(?:\s(?:is|are|was|equals|would\sbe|should\sbe|must\sbe)"
    rf"(?:\sthus|\stherefore|\sindeed)?\b[ \t]*:?|:)"
    rf"|\b{_SPACED}(?:\s+(?:finale?|correct[ae]?|richtige))?\s+{_VERBS}\b[ \t]*:?"
    rf"|{_UNSPACED}(?:应该|應該|应)?(?:是|为|為|选|選|は|은|는)[ \t]*[:\uff1a]?"
    rf"|(?<![^\W\d_])(?:故|应该?|應該?|因此|所以|本题|本題)?(?:选择|選擇|选|選)[ \t]*[:\uff1a]?"
    rf"(?=[\s(\uff08]*[A-J](?![A-Za-z])))"
    rf"[*_ \t]*(?:\n\s*)?(\S[^\n]*)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(
    r"(?<!\b[A-Za-z])(?<!\b[DMS][rst])(?<!\bRs)(?<!\bMrs)[.!?]\s|(?<=\b[A-Za-z])\.\s+(?=[A-Z])|[\u3002\uff01\uff1f]"
)
_CLOSING_WORDS = re.compile(
    r"\W*(?:I\s+)?hope\b|\W*(?:please\s+)?(?:let me know|feel free)\b|\W*if you (?:have|need|want)\b", re.IGNORECASE
)
# Who writes one of these around an answer has not decided, if the rest is missing.
_DOUBT = re.compile(
    r"\?|\b(?:wait|hmm+|maybe|perhaps|guess|actually|alternatively|but|not|try|suppose|check|verify|recheck)\b",
    re.IGNORECASE,
)


# Who writes one of these behind an answer takes it back.
_RETRACTED = re.compile(
    r"(?:^|[.!?\n])\W{0,9}(?:(?:wait|oops|sorry|hold on|hmm+|no,|actually)\b[^.!?\n]{0,80}?"
    r"\b(?<!no )(?<!any )(?:wrong|incorrect|mistaken?|error|not (?:right|correct))\b(?!\s*\?)|correction\s*:)"
    r"|\bI (?:made|have made) an? (?:\w+ )?(?:mistake|error)\b|\bscratch that\b"
    r"|[.!?\n]\W{0,9}or\b(?!\s+(?:equivalently|in|simply|just|about|approximately|as|written)\b)",
    re.IGNORECASE,
)


class Answer(NamedTuple):
    """``marked``: the response says that this is the answer. Otherwise it is the last line that has a word."""

    text: str
    marked: bool


class _Mark(NamedTuple):
    start: int
    end: int
    text: str


def final_answer(response: str, finish_reason: str | None = None) -> Answer | None:
    """The answer of a response: behind its reasoning, the last one, and complete. None if it has none.

    Marks are <answer> tags, \\boxed{...}, "#### 72", and "the answer is", also in other languages. Boxes that only a
    comma, "and" or "or" separates are one answer. A mark that the text behind it takes back is none. Of a response that
    was cut off (`finish_reason` is "length") a mark counts whose end is there, unless the text doubts it or goes back
    on it.
    """
    text = outside_reasoning(response)
    if text is None:
        return None
    text = re.sub(r"</?(?:b|strong)>", "**", text.replace("[END FINAL RESPONSE]", ""))
    text = _DISPLAY.sub(r"$$\1$$", text)
    cut = finish_reason == CUT_OFF
    for opening, closing in _TAGS:
        if opened := list(opening.finditer(text)):
            closed = closing.search(text, opened[-1].end())
            if cut and not closed:
                return None
            nested = final_answer(text[opened[-1].end() : closed.start() if closed else len(text)])
            return None if nested is None else Answer(nested.text, True)
    mark = _last_mark(text)
    if isinstance(mark, _Mark) and (cut or not _RETRACTED.search(text[mark.end :])):
        if cut and (mark.end >= len(text.rstrip()) or _doubted(text, mark)):
            return None
        return Answer(mark.text, True)
    lines = [line.strip() for line in text.splitlines() if re.search(r"\w|[^\x00-\x7f]", line)]
    while len(lines) > 1 and _CLOSING_WORDS.match(lines[-1]):
        lines.pop()
    if cut or mark is _BROKEN or not lines:
        return None
    # Of a line that took an answer back, what follows.
    return Answer(lines[-1] if mark is None else _after_retraction(lines[-1]), False)


def outside_reasoning(response: str) -> str | None:
    """A response without its reasoning; None if its reasoning has no end. Reasoning may begin in the prompt."""
    if bare := _BARE_CHANNEL.match(response):
        return response[bare.end() :] if bare[0].endswith("assistantfinal") else None
    pieces: list[str] = []
    at, reasons = 0, False
    for mark in _REASONING_MARK.finditer(response):
        if mark["opening"]:
            if not reasons:
                pieces.append(response[at : mark.start()])
            reasons = True
        else:
            # What stands before a closing mark without an opening one is reasoning that the prompt has opened.
            pieces = pieces if reasons else []
            at, reasons = mark.end(), False
    return None if reasons else "\n".join([*pieces, response[at:]])


# The last box is not closed, or no box has a content.
_BROKEN = object()


def _last_mark(text: str) -> _Mark | object | None:
    """The mark that states the answer, `_BROKEN`, or None without any."""
    boxes, broken = _boxes(text)
    lines = [_Mark(m.start(), m.end(), m[1] or m[2]) for m in _ANSWER_LINE.finditer(text)]
    if boxes or broken:
        behind = [line for line in lines if not boxes or line.start >= boxes[-1].end]
        if behind and not _BOX.search(behind[-1].text):
            return _stated(behind[-1])
        return _BROKEN if broken else _joined(text, boxes)
    hashes = [_Mark(m.start(), m.end(), m[1]) for m in _HASHES.finditer(text)]
    # Models also write headings of the fourth level: those have words, and text below.
    hashes = [mark for mark in hashes if not text[mark.end :].strip() or not re.search(r"[A-Za-z]{3}", mark.text)]
    sentences = [_stated(_Mark(m.start(), m.end(), m[1])) for m in _ANSWER_SENTENCE.finditer(text)]
    marks = hashes + sentences + [_stated(line) for line in lines]
    return max(marks, key=lambda mark: mark.start, default=None)


def _after_retraction(line: str) -> str:
    """The last sentence of a line that takes back an answer."""
    ends = [end.end() for end in _SENTENCE_END.finditer(line) if line[end.end() :].strip()]
    return line[max(ends, default=0) :]


def _stated(mark: _Mark) -> _Mark:
    """A statement up to the end of its sentence."""
    text = mark.text.lstrip(".\u2026 ") or mark.text
    mark = _Mark(mark.start + len(mark.text) - len(text), mark.end, text)
    end = _SENTENCE_END.search(mark.text)
    kept = mark.text[: end.start() + 1] if end else mark.text
    end_of_mark = mark.end - len(mark.text) + len(kept)
    if kept.count("}") > kept.count("{"):
        kept = kept.strip(" }")  # of JSON: {"answer": 72}, or of \\textbf{Answer:}
    return _Mark(mark.start, end_of_mark, kept.strip().rstrip("!"))


def _boxes(text: str) -> tuple[list[_Mark], bool]:
    """The innermost boxes with a content in their order, and whether nothing can be taken from them."""
    boxes: list[_Mark] = []
    closing = _closing_braces(text)
    at, broken = 0, False
    while box := _BOX.search(text, at):
        at = box.end()
        end = closing.get(at)
        if text[at : at + 1] != "{":
            word = _BARE_CONTENT.match(text, at)
            content, end = (word[0], word.end()) if word else ("", at)
        elif end is None:
            broken, at = True, at + 1
            continue
        else:
            content, end = text[at + 1 : end].strip(), end + 1
        if _BOX.search(content):
            at += 1
            continue
        at = end
        if content:
            boxes.append(_Mark(box.start(), end, content))
            broken = False
        else:
            broken = broken or not boxes
    return boxes, broken


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace is closed; escaped braces do not count."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    return closing


def _joined(text: str, boxes: Sequence[_Mark]) -> _Mark:
    """The last box, with those before it that only a comma or a conjunction separates."""
    first = len(boxes) - 1
    while first:
        between = text[boxes[first - 1].end : boxes[first].start]
        if len(between) > _BETWEEN_LONGEST or not _BETWEEN_BOXES.fullmatch(between):
            break
        first -= 1
    return _Mark(boxes[first].start, boxes[-1].end, ", ".join(box.text for box in boxes[first:]))


def _doubted(text: str, mark: _Mark) -> bool:
    """Whether the sentence of a mark, or anything behind it, doubts it or goes back on it."""
    sentence = max((end.end() for end in _SENTENCE_END.finditer(text, 0, mark.start)), default=0)
    return bool(_DOUBT.search(text, sentence, mark.start) or _DOUBT.search(text, mark.end))


def references(value: Any) -> list[str]:
    """The texts of a reference, each of which is a right answer; empty if the reference is missing.

    Null, NaN and blank text are missing. Of a worked solution ("... #### 72", or with a box) the final answer counts.
    A list of texts has alternatives. Raises DataError for any other value that is neither text nor a number.
    """
    if isinstance(value, list | tuple):
        each = [references(item) for item in value]
        if all(isinstance(item, str) or item is None for item in value):
            return [text for texts in each for text in texts]
        return [", ".join(texts[0] for texts in each)] if all(each) else []
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()  # a scalar of NumPy or torch
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return []
    if isinstance(value, Decimal) and value.is_nan():
        return []
    if isinstance(value, bool | int | float | Decimal):
        return [str(value)]
    if not isinstance(value, str):
        raise DataError(
            f"a reference answer must be text, a number, or a list of texts, got {value!r:.80}; name the column that "
            f"has it in data.columns, for example {{answer: solution}}, or a reward function in rollout.reward"
        )
    if not value.strip():
        return []
    answer = _last_mark(value)
    return [answer.text if isinstance(answer, _Mark) else value.strip()]


def scored(
    completions: Sequence[str],
    values: Sequence[Any],
    finish_reasons: Sequence[str] | None,
    score: Callable[[Answer, list[str]], float | None],
) -> list[float | None]:
    """The scores of responses: None without a reference, 0.0 for a response without an answer, else `score`."""
    reasons = finish_reasons or [None] * len(completions)
    scores: list[float | None] = []
    for completion, value, reason in zip(completions, values, reasons, strict=True):
        right = references(value)
        answer = final_answer(completion, reason) if right else None
        scores.append(score(answer, right) if answer else 0.0 if right else None)
    return scores
