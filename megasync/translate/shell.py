"""Reads the commands of a shell script without running any of them.

    VALUE=$((1024 * 2))         variables, arithmetic, `${NAME:-default}`, arrays and `+=` are substituted
    ARGS=(--lr 1e-6)            quotes, comments, line continuations and here-documents are those of bash
    python3 train.py ${ARGS[@]} becomes the words python3, train.py, --lr, 1e-6

Invariant: a word says how far it can be trusted, and no word is a guess. What the environment gives (a variable that
the script never sets) stays a reference to it; what only a run of the script could tell (the output of a command, its
own arguments, a variable that an `if` or a loop sets) is a reason in `Word.unknown`. `_Reader` guarantees it: it alone
makes words, and looks every variable up in what it has read so far.
"""

from __future__ import annotations

import ast
import bisect
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from megasync.errors import ConfigError

# Characters of a word, and words of an array; a variable that doubles itself reaches them soon.
MOST_CHARACTERS, MOST_WORDS = 100_000, 10_000
# Substitutions within each other.
DEEPEST = 50

_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DECLARES = {"export", "local", "readonly", "declare", "typeset"}
_OPENS, _CLOSES = {"if", "for", "while", "until", "case", "{"}, {"fi", "done", "esac", "}"}
_INNER = {"then", "else", "elif", "do", "!", "time", "function"}
_REDIRECTS = re.compile(r"\d*(<<<|<<-?|>>|&>|<|>)&?")
_DELIMITER = re.compile(r"[\"'\\]?([\w.-]+)[\"']?")
_OPERATORS: dict[type[Any], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda left, right: abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1),
}


@dataclass(frozen=True, slots=True)
class Word:
    """A word after substitution. ``environment`` names variables that ``text`` refers to as ${oc.env:NAME}.

    ``unknown`` says what only a run of the script could tell, and ``text`` has such parts as they are written.
    """

    text: str
    unknown: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its words, and the line on which it begins."""

    words: tuple[Word, ...]
    line: int


@dataclass(slots=True)
class _Partial:
    """A word in the making. A quoted one exists even if it is empty."""

    texts: list[str] = field(default_factory=list[str])
    size: int = 0
    unknown: list[str] = field(default_factory=list[str])
    environment: list[str] = field(default_factory=list[str])
    exists: bool = False

    def add(self, word: Word) -> None:
        self.texts.append(word.text)
        self.size += len(word.text)
        self.unknown += word.unknown
        self.environment += word.environment
        self.exists = True
        if self.size > MOST_CHARACTERS:
            raise ConfigError(f"a word expands to more than {MOST_CHARACTERS:,} characters; shorten it")

    def word(self) -> Word:
        return Word("".join(self.texts), tuple(dict.fromkeys(self.unknown)), tuple(dict.fromkeys(self.environment)))


def read_commands(text: str) -> list[Command]:
    """The commands of a script, in its order, whatever `if` or function they stand in. Raises ConfigError."""
    return list(_Reader(text.replace("\r\n", "\n")).commands())


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._ends = [match.start() for match in re.finditer("\n", text)]
        self._variables: dict[str, list[Word]] = {}
        # Within how many blocks and subshells the reader stands that may not run, or run more than once; and whether
        # the next command follows && or ||.
        self._blocks = self._subshells = 0
        self._follows = False
        self._heredocs: list[tuple[str, bool]] = []

    def commands(self) -> Iterator[Command]:
        while self._at < len(self._text):
            self._blanks()
            line = self._line(self._at)
            words = self._command()
            while words and words[0].text in _OPENS | _CLOSES | _INNER:
                first = words.pop(0).text
                if first == "function":
                    words = words[1:]
                self._blocks = max(0, self._blocks + (first in _OPENS) - (first in _CLOSES))
                if first in ("for", "case") and words:
                    self._assign(words[0].text, [Word("", (f"a {first} sets {words[0].text}",))], first)
                    words = []
            if words and words[0].text in ("read", "mapfile", "readarray"):
                for word in words[1:]:
                    if _NAME.fullmatch(word.text):
                        self._assign(word.text, [Word("", (f"{words[0].text} sets {word.text}",))], "read")
            elif words:
                yield Command(tuple(words), line)

    def _command(self) -> list[Word]:
        """The words up to the end of a command; assignments that precede them are made."""
        words: list[Word] = []
        declares = False
        while self._at < len(self._text):
            self._spaces()
            char = self._peek()
            if (redirect := _REDIRECTS.match(self._text, self._at)) is not None:
                self._redirect(redirect)
                continue
            if char in "\n;&|":
                self._end_of_command(char)
                break
            if char in "()":  # a subshell, a pattern of a case, or the () of a function
                self._at += 1
                if (char == "(" and words and self._peek() == ")") or (char == ")" and not self._subshells):
                    words = []  # the name of a function, or the pattern
                self._subshells = max(0, self._subshells + (1 if char == "(" else -1))
                continue
            assigned = _ASSIGNED.match(self._text, self._at)
            if assigned is not None and (declares or not words):
                self._at = assigned.end()
                self._assign(assigned[1], self._value(), assigned[2])
                continue
            word = self._word()
            if not words and len(word) == 1 and word[0].text in _DECLARES:
                declares = True
                continue
            if not declares:
                words += word
            if len(words) > MOST_WORDS:
                raise ConfigError(f"a command has more than {MOST_WORDS:,} words")
        return words

    def _end_of_command(self, char: str) -> None:
        self._at += 1
        self._follows = char in "&|" and self._peek() == char
        if self._follows:
            self._at += 1
        if char == "\n":
            self._skip_heredocs()

    def _redirect(self, match: re.Match[str]) -> None:
        self._at = match.end()
        self._spaces()
        if match[1] in ("<<", "<<-"):
            delimiter = _DELIMITER.match(self._text, self._at)
            if delimiter is not None:
                self._at = delimiter.end()
                self._heredocs.append((delimiter[1], match[1] == "<<-"))
        elif self._peek() not in "\n;&|":
            self._word()

    def _skip_heredocs(self) -> None:
        for delimiter, indented in self._heredocs:
            while self._at < len(self._text):
                end = self._text.find("\n", self._at)
                end = len(self._text) if end < 0 else end
                line = self._text[self._at : end]
                self._at = end + 1
                if (line.lstrip("\t") if indented else line) == delimiter:
                    break
        self._heredocs = []

    # Variables

    def _value(self) -> list[Word]:
        """Reads the value of an assignment: the words of an array, or a single one."""
        if self._peek() != "(":
            return self._word(splits=False) if not self._at_end_of_word() else [Word("")]
        self._at += 1
        words: list[Word] = []
        while self._at < len(self._text):
            self._blanks()
            if self._peek() == ")":
                self._at += 1
                break
            if self._peek() in ";&|<>(":
                self._at += 1
                continue
            words += self._word()
            if len(words) > MOST_WORDS:
                raise ConfigError(f"an array has more than {MOST_WORDS:,} words")
        return words

    def _assign(self, name: str, words: list[Word], how: str) -> None:
        before = self._variables.get(name)
        if how == "+" and before is not None:
            joined = _Partial()
            if len(before) == len(words) == 1:
                joined.add(before[0])
                joined.add(words[0])
                words = [joined.word()]
            else:
                words = before + words
        conditional = self._blocks or self._subshells or self._follows
        if conditional and how not in ("for", "case", "read") and before != words:
            said = f"{name} depends on a condition, a loop or a function"
            words = [Word(word.text, (*word.unknown, said), word.environment) for word in words] or [Word("", (said,))]
        if len(words) > MOST_WORDS:
            raise ConfigError(f"the array {name} has more than {MOST_WORDS:,} words")
        self._variables[name] = words

    def _lookup(self, name: str, whole: bool) -> list[Word]:
        words = self._variables.get(name)
        if words is None:
            if whole:  # an array that another file sets
                return [Word("", (f"{name} is not set in this file",))]
            return [Word("~" if name == "HOME" else f"${{oc.env:{name}}}", (), () if name == "HOME" else (name,))]
        return words if whole else words[:1] or [Word("")]

    # Words

    def _word(self, splits: bool = True) -> list[Word]:
        """The words that the next one expands to: several if an unquoted substitution has blanks, or is an array."""
        done: list[Word] = []
        part = _Partial()
        start = self._at
        while not self._at_end_of_word():
            char = self._peek()
            if char == "'":
                end = self._find("'", self._at + 1)
                part.add(Word(self._text[self._at + 1 : end]))
                self._at = end + 1
            elif char == '"':
                self._at += 1
                self._quoted(part, done)
            elif char == "\\":
                if self._text.startswith("\n", self._at + 1):
                    self._at += 2
                else:
                    part.add(Word(self._text[self._at + 1 : self._at + 2]))
                    self._at += 2
            elif char == "$" or char == "`":
                for number, piece in enumerate(self._substitution(0)):
                    whole = not splits or piece.unknown
                    for index, text in enumerate([piece.text] if whole else re.split(r"\s+", piece.text)):
                        if number or index:
                            self._finish(part, done)
                        if text or whole:
                            part.add(Word(text, piece.unknown, piece.environment))
            else:
                part.add(Word(char))
                self._at += 1
        if self._at == start:  # a character that ends words, and begins nothing
            self._at += 1
        self._finish(part, done)
        return done

    def _finish(self, part: _Partial, done: list[Word]) -> None:
        if part.exists:
            done.append(part.word())
            if len(done) > MOST_WORDS:
                raise ConfigError(f"a word expands to more than {MOST_WORDS:,} words")
        part.texts, part.size, part.unknown, part.environment, part.exists = [], 0, [], [], False

    def _quoted(self, part: _Partial, done: list[Word]) -> None:
        """Text in double quotes, of which only an array with [@] becomes several words."""
        part.exists = True
        self._find('"', self._at)
        while self._at < len(self._text) and self._peek() != '"':
            char = self._peek()
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ('"', "\\", "$", "`", "\n"):
                part.add(Word(self._text[self._at + 1].replace("\n", "")))
                self._at += 2
            elif char in "$`":
                for number, piece in enumerate(self._substitution(0)):
                    if number:
                        self._finish(part, done)
                    part.add(piece)
            else:
                part.add(Word(char))
                self._at += 1
        self._at += 1

    def _substitution(self, depth: int) -> list[Word]:
        """Substitutes a $ or a backquote; several words if it is an array."""
        if depth > DEEPEST:
            raise ConfigError(f"substitutions are nested more than {DEEPEST} levels deep")
        text, start = self._text, self._at
        if text.startswith("`", start):
            self._at = self._find("`", start + 1) + 1
            return [self._unknown(start, "the output of a command")]
        if text.startswith("$((", start):
            self._at = self._closing(start + 1, "(", ")")
            return [self._arithmetic(text[start + 3 : self._at - 2], text[start : self._at], depth)]
        if text.startswith("$(", start):
            self._at = self._closing(start + 1, "(", ")")
            return [self._unknown(start, "the output of a command")]
        if text.startswith("${", start):
            self._at = self._closing(start + 1, "{", "}")
            return self._braced(text[start + 2 : self._at - 1], start, depth)
        if (name := _NAME.match(text, start + 1)) is not None:
            self._at = name.end()
            return self._lookup(name[0], whole=False)
        if text[start + 1 : start + 2] in tuple("@*#?!$-0123456789"):
            self._at += 2
            return [self._unknown(start, "an argument of the script")]
        self._at += 1
        return [Word("$")]

    def _braced(self, inner: str, start: int, depth: int) -> list[Word]:
        match = re.fullmatch(r"([A-Za-z_]\w*)(\[[@*]\])?((?::?[-=])(.*))?", inner, re.DOTALL)
        if match is None:
            what = "an argument of the script" if re.match(r"[\d@*]", inner) else "a form of ${...} that is not read"
            return [self._unknown(start, what)]
        name, whole, otherwise, default = match.groups()
        words = self._variables.get(name)
        empty = words is not None and [(word.text, word.unknown) for word in words] == [("", ())]
        if otherwise is None or (words is not None and not (otherwise.startswith(":") and empty)):
            return self._lookup(name, whole is not None)
        words = self._inner(default, depth + 1)
        if otherwise.lstrip(":").startswith("="):
            self._variables[name] = words
        return words

    def _inner(self, text: str, depth: int) -> list[Word]:
        """The words of a default value, which may hold substitutions in turn."""
        if depth > DEEPEST:
            raise ConfigError(f"substitutions are nested more than {DEEPEST} levels deep")
        outer = self._text, self._at
        self._text, self._at = text, 0
        part = _Partial(exists=True)
        try:
            while self._at < len(self._text):
                char = self._peek()
                if char in "$`":
                    for piece in self._substitution(depth):
                        part.add(piece)
                    continue
                if char == "\\":
                    self._at += 1
                if char not in "\"'":
                    part.add(Word(self._text[self._at : self._at + 1]))
                self._at += 1
        finally:
            self._text, self._at = outer
        return [part.word()]

    def _arithmetic(self, inner: str, written: str, depth: int) -> Word:
        word = self._inner(inner, depth + 1)[0]
        unknown = [*word.unknown, *(f"{name} is not set in this file" for name in word.environment)]

        def number(node: ast.expr) -> int:
            if isinstance(node, ast.Constant) and type(node.value) is int:
                return node.value
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
                return -number(node.operand)
            if isinstance(node, ast.Name):
                found = self._variables.get(node.id) or [Word("", (f"{node.id} is not set in this file",))]
                unknown.extend(found[0].unknown)
                return int(found[0].text)
            if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
                return _OPERATORS[type(node.op)](number(node.left), number(node.right))
            raise ValueError

        try:
            # Integer division of the shell, written so that Python parses it; no operator here makes large numbers.
            value = number(ast.parse(word.text.replace("/", "//").strip(), mode="eval").body)
            if abs(value) < 10**18 and not unknown:
                return Word(str(value))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError, IndexError):
            pass
        return Word(written, tuple(unknown) or ("arithmetic that only the shell can do",))

    def _unknown(self, start: int, what: str) -> Word:
        written = self._text[start : self._at]
        return Word(written, (f"{what}: {written:.60}",))

    # Characters

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1] or "\n"

    def _at_end_of_word(self) -> bool:
        return self._at >= len(self._text) or self._peek() in " \t\n;&|()<>"

    def _spaces(self) -> None:
        """Skips blanks, continued lines and a comment."""
        while self._at < len(self._text):
            if self._peek() in " \t":
                self._at += 1
            elif self._text.startswith("\\\n", self._at):
                self._at += 2
            elif self._peek() == "#":
                end = self._text.find("\n", self._at)
                self._at = len(self._text) if end < 0 else end
            else:
                return

    def _blanks(self) -> None:
        """Skips blanks, comments and ends of lines."""
        self._spaces()
        while self._at < len(self._text) and self._peek() == "\n":
            self._at += 1
            self._spaces()

    def _find(self, char: str, start: int) -> int:
        end = self._text.find(char, start)
        if end < 0:
            raise ConfigError(f"line {self._line(start)}: {char} is never closed; correct the script")
        return end

    def _line(self, at: int) -> int:
        return bisect.bisect_left(self._ends, at) + 1

    def _closing(self, start: int, opens: str, closes: str) -> int:
        """The position behind the bracket that closes the one at ``start``."""
        depth, at, quote = 0, start, ""
        while at < len(self._text):
            char = self._text[at]
            if char == "\\":
                at += 1
            elif quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char == opens:
                depth += 1
            elif char == closes:
                depth -= 1
                if not depth:
                    return at + 1
            at += 1
        raise ConfigError(f"line {self._line(start)}: {opens} is never closed; correct the script")
