"""Finds the program in an answer. Pure.

An answer may have several fenced blocks, in several languages, with prose between them. The program is the last block
of Python that defines what the tests call, or that reads its input, and before it the blocks whose names it uses.
Nothing here parses the program: a model's text could exhaust the parser of this process.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection

from megasync.data.final_answer import outside_reasoning

_FENCE = re.compile(r"(?P<before>[^`~]*?)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)")
_PYTHON = frozenset({"python", "py", "python3", "py3", "python2", "cpython", "pypy", "pypy3", "sage", "ipython"})
_PYTHON |= {"ipython3", "python-exec", "python-repl"}
# Such a block may hold any text, as one without a language.
_NO_LANGUAGE = frozenset({"", "code", "plain", "plaintext", "text", "txt"})
# Around a program without a fence.
_TAGGED = re.compile(
    r"(?:\[PYTHON\]|<(?:python|code|answer)\b[^>\n]*>)(.*?)(?:\[/PYTHON\]|</(?:python|code|answer)>|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d]\w*")
_DEFINES = re.compile(
    r"^(?:(?:async[ \t]+)?def[ \t]+(?P<function>\w+)"
    r"|class[ \t]+(?P<kind>\w+)"
    r"|(?P<variable>\w+)[ \t]*(?::[^=\n]+)?=(?!=)"
    r"|(?:from[ \t]+\S+[ \t]+)?import[ \t]+(?P<imported>[^\n#]+))",
    re.MULTILINE,
)
# Lines of Python that prose and printed output do not have.
_CODE = re.compile(
    r"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+\w+[ \t]*\(|class[ \t]+\w+[ \t]*[(:]|(?:from[ \t]+\S+[ \t]+)?import[ \t]+\w"
    r"|(?:for[ \t].+[ \t]in|while|if)[ \t].+:[ \t]*(?:#.*)?$|[\w.]+[ \t]*\(.*\)[ \t]*$|\w[\w.\[\]]*[ \t]*=[ \t]*\S)",
    re.MULTILINE,
)
_READS = re.compile(r"\binput[ \t]*\(|\bstdin\b|\bopen[ \t]*\([ \t]*0|\bfileinput\b|\bos\.read\b")
# A statement at the start of a line that is no definition: the block does something when it runs.
_ACTS = re.compile(r"^(?!(?:async[ \t]+)?def\b|class\b|import\b|from\b|@|#|[)\]}\"']|\w+[ \t]*=)[^\s]", re.MULTILINE)


def program_of(answer: str, names: Collection[str] = ()) -> str | None:
    """The program of an answer whose tests use `names`, or run it if there are none. None if it has no program.

    Reasoning does not count, and an answer that is nothing else has no program.
    """
    outside = outside_reasoning(answer)
    if outside is None:
        return None
    answer = outside.replace("\r\n", "\n").replace("\r", "\n")
    blocks = _blocks(answer)
    if not blocks:
        # Prose is no program, but the answer may be nothing but code.
        tagged = [text for text in _TAGGED.findall(answer) if _CODE.search(text)]
        return tagged[-1] if tagged else answer if _CODE.search(answer) else None
    programs = [
        text for language, text in blocks if language in _PYTHON or (language in _NO_LANGUAGE and _CODE.search(text))
    ]
    if not programs:
        return None
    defined = [_defined(text) for text in programs]
    at = _last_that_defines(defined, names) if names else _last_that_runs(programs)
    return "\n".join(programs[n] for n in _with_needed(programs, defined, at, names))


def _last_that_defines(defined: list[set[str]], names: Collection[str]) -> int:
    counts = [len(block_names.intersection(names)) for block_names in defined]
    return max(range(len(counts)), key=lambda n: (counts[n], n))


def _last_that_runs(programs: list[str]) -> int:
    """The last block that reads its input and acts, else that acts, else the last."""
    ranks = [bool(_ACTS.search(text)) * (1 + bool(_READS.search(text))) for text in programs]
    return max(range(len(ranks)), key=lambda n: (ranks[n], n))


def _with_needed(programs: list[str], defined: list[set[str]], last: int, names: Collection[str]) -> list[int]:
    """The numbers of a block and of the earlier ones that define names which the tests or one of them lack."""
    chosen, defined_names, needed = [last], set(defined[last]), {*names, *_WORD.findall(programs[last])}
    for n in range(last - 1, -1, -1):
        if (needed - defined_names) & defined[n]:
            chosen.append(n)
            defined_names |= defined[n]
            needed |= set(_WORD.findall(programs[n]))
    return chosen[::-1]


def _defined(text: str) -> set[str]:
    """The names that a block defines at its top."""
    names: set[str] = set()
    for match in _DEFINES.finditer(text):
        names.update(name for key, name in match.groupdict().items() if name and key != "imported")
        if match["imported"]:
            names.update(part.split()[-1] for part in match["imported"].strip("( )\\").split(",") if part.strip())
    return names


def _blocks(answer: str) -> list[tuple[str, str]]:
    """(language in lower case or "", text) of each fenced block. A block without an end goes on to the end."""
    blocks: list[tuple[str, list[str]]] = []
    before: list[str] = []
    marks = quote = ""
    indent = 0
    for line in answer.split("\n"):
        if marks:
            code = line.removeprefix(quote)
            stripped = code.lstrip()
            # Deeper in the code, it is part of a text.
            if stripped.startswith(marks) and len(code) - len(stripped) <= indent + 3:
                rest = stripped.lstrip(marks[0]).strip()
                if _WORD.fullmatch(rest):
                    # The end before it is missing.
                    blocks.append((rest.lower(), []))
                else:
                    marks = ""
            elif (kept := code.rstrip().removesuffix(marks)) != code.rstrip() and kept.strip() and "`" not in kept:
                blocks[-1][1].append(kept)
                marks = ""
            else:
                blocks[-1][1].append(code)
        elif fence := _FENCE.fullmatch(line):
            language = re.match(r"[\s{.]*([\w+#-]*)", fence["info"])
            name = language[1].lower() if language else ""
            if not blocks and not fence["info"].strip() and _CODE.match("\n".join(before).lstrip("\n")):
                # The prompt has begun the block that ends here.
                blocks.append(("python", before))
            # After prose in the same line only a named language makes it a fence.
            elif name in _PYTHON or not fence["before"].strip(" \t>-*+.:0123456789"):
                marks = fence["marks"]
                indent = len(line) - len(line.lstrip())
                quote = fence["before"] if fence["before"].lstrip().startswith(">") else ""
                blocks.append((name, []))
        elif not blocks:
            before.append(line)
    return [(language, textwrap.dedent("\n".join(lines)) + "\n") for language, lines in blocks]
