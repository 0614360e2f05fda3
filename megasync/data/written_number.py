"""Numbers as people write them, as exact fractions: 1,234.5 and 1.234,5, 3 1/2, 25 %, $18, 3.2 × 10⁵, 5 cm, twelve.

Invariant: a text that is no number for sure is None, never a number that some of its characters give.
"""

from __future__ import annotations

import ast
import math
import operator
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

# Longer texts are not read as numbers, and larger numbers (in bits) are not computed.
LONGEST = 400
LARGEST, LARGEST_FACTORIAL = 100_000, 3000

# Words of a unit, or of what is counted.
MOST_WORDS = 5

# A decimal stands for another number from so many significant digits on: 0.333333 for 1/3, but not 0.33.
ROUNDED_DIGITS = 6

_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\ufe63\uff0d", "-")
    | dict.fromkeys("×·\u22c5\u2219\u2217", "*")
    | dict.fromkeys("÷\u2044\u2215", "/")
    | dict.fromkeys("\u00a0\u2009\u202f\u2007\u2002\u2003\u205f\u2800\u3000", " ")
    # Signs without a width.
    | dict.fromkeys("\u00ad\u200b\u200c\u200d\u2060\u2061\u2062\u2063\u2064\ufe0e\ufe0f\ufeff", "")
    # No number of the languages that write these has them inside.
    | dict.fromkeys("\u3001\uff0c\u060c", ", ")
    | {"°": " degrees ", "\u2019": "'", "\uff05": "%", "\ufe6a": "%", "\u2236": ":", "\u3002": ". "}
    | {"\u066b": ".", "\u066c": ",", "\u066a": "%", "\u00b5": "\u03bc"}
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻"
_SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉"
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![a-z])", r"\\frac"),
        (r"\{\s*,\s*\}|,(?:\s*\\[!,;: ])+\s*(?=\d{3})", ","),
        (r"(?<!\\)\\!\s*", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-z])|\\(?:thin|med|thick)space(?![a-z])", " "),
        (r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|[lL]arge|LARGE|[hH]uge|small)(?![a-zA-Z])", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (
            r"\\(?:text|textbf|textit|textrm|textsf|texttt|mathrm|mathbf|mathit|mathsf|bf|mbox|hbox|operatorname\*?|"
            r"boldsymbol|emph|underline)\s*\{((?:[^{}]|\{[^{}]*\})*)\}",
            r" \1 ",
        ),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree(?![a-z])|\\circ(?![a-z])", " degrees "),
        (r"\\(?:times|cdot|ast)(?![a-z])", "*"),
        (r"\\div(?![a-z])", "/"),
        (r"\\cent(?![a-z])", "¢"),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))", "*"),
        (r"\\([$%#&_])", r"\1"),
    )
]
_THOUSANDS = re.compile(
    r"[1-9]\d{0,2}(?:,\d{3})+(?![\d,])(?:\.\d+)?"  # 1,234,567.5
    r"|[1-9]\d?(?:,\d{2})+,\d{3}(?![\d,])(?:\.\d+)?"  # 12,34,567.5
    r"|[1-9]\d{0,2}(?:[ '_]\d{3})+(?![\d_'])(?:[.,]\d+)?"  # 1 234 567,5
    r"|[1-9]\d{0,2}(?:\.\d{3}){2,}(?![\d.])(?:,\d+)?|[1-9]\d{0,2}(?:\.\d{3})+,\d+(?![\d,.])"  # 1.234.567 and 1.234,5
)
_NUMBER = rf"(?:{_THOUSANDS.pattern}|\d+,\d+(?![\d,])|\d+(?:\.\d+)?|\.\d+)"
# What `_exact` gives for one number: with a fraction, a power, a power of ten, or a mixed number.
_LITERAL = re.compile(
    r"[-+]?\(*[-+]?(?:D(?:\^S)?\)*(?:/\(*S\)*(?:\^S)?)?(?:\*10\^S)?|\(D\+D/D\))\)*".replace(
        "S", r"\(?[-+]?D\)?"
    ).replace("D", r"(?:\d++(?:\.\d*+)?|\.\d++)")
)
# 3 1/2, 3 and 1/2, 3\frac{1}{2}: a whole number before a proper fraction.
_MIXED = re.compile(
    r"(?<![\d.,/^*{(])(\d+)(?:\s+(?:and\s+|&\s*)?|\s*(?=\\frac))(?:(\d+)\s*/\s*(\d+)|\\frac\s*\{(\d+)\}\s*\{(\d+)\})(?![\d.,^!])"
)
# 0.1\overline{6}, 0.1\dot{6} and 0.1(6).
_REPEATING = re.compile(r"(\d*)\.(\d*)(?:\\(?:overline|bar|dot)\s*\{(\d+)\}|\((\d+)\)$)")
_FRACTION = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_CURRENCIES = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen", "₹": "rupee", "US$": "dollar"}
_SYMBOL = re.compile(r"(?:US)?\$|[€£¥₹]")
_MAGNITUDES = {
    "hundred": 100, "thousand": 1000, "lakh": 10**5, "million": 10**6, "crore": 10**7, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip
_TEENS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORDS = {word: number for number, word in enumerate(_TEENS)} | {word: 10 * n for n, word in enumerate(_TENS, 2)}
# Names of one unit.
_UNITS = {
    name: names.split()[0]
    for names in (
        "m meter metre", "cm centimeter centimetre", "mm millimeter millimetre", "km kilometer kilometre", "g gram",
        "kg kilogram kilo", "mg milligram", "s sec second", "min minute", "h hr hour", "l liter litre", "ml milliliter",
        "ft foot feet", "in inch inches", "mi mile", "lb pound lbs", "oz ounce", "degree deg", "dollar usd buck",
        "euro eur", "cent ¢", "rupee inr rs", "unit", "mph mile/h", "km/h kph kmh", "m/s mps", "j joule", "n newton",
        "w watt", "v volt", "a ampere amp", "k kelvin", "hz hertz", "yd yard", "rad radian", "ms millisecond",
    )
    for name in names.split()
}  # fmt: skip
UNIT_NAMES = tuple(_UNITS)
# LaTeX for units: \Omega, \mu before another unit, and \frac{m}{s^2}.
_OHM = re.compile(r"([kM]?)(?:\\Omega(?![a-z])|\u03a9|\u2126)")
# Names of currencies before an amount.
_CURRENCY_NAME = re.compile(
    r"^(?:(?P<dollar>USD)|(?P<euro>EUR)|(?P<pound>GBP|\\pounds)|(?P<rupee>Rs\.?|INR))\s*(?=[-\d])"
)
_SIGNS = {"dollar": "$", "euro": "€", "pound": "£", "rupee": "₹"}
_MICRO = re.compile(r"(?:\\mu(?![a-z])|\u03bc)\s*(?=[mgsAFCVLW]\b)")
_UNIT_FRACTION = re.compile(r"\\frac\s*\{\s*([A-Za-z]+)\s*\}\s*\{\s*([A-Za-z]+)\s*(?:\^\s*\{?(\d)\}?)?\s*\}$")
# A letter directly behind a number is a factor, unless it is one of these units.
_GLUED = re.compile(r"(?:[cmk]?m|[km]?g|m?[lL]|h|s|ms|min|[km]?[JNWVA]|Hz|ft|mph|kph|lbs?|oz|k?m/h|m/s)(?![a-zA-Z])")
# Words that go on with the sentence, or that are mathematics.
_NO_UNIT = re.compile(
    r"\b(?:or|and|to|not|but|is|are|was|because|since|which|so|as|than|about|pi|sqrt|sin|cos|tan|log|ln|exp|mod|if|where"
    r"|with|for|when|factorial|squared|cubed|i|e|x|y|z|(?-i:k|t|c)|b|p|q|r|d)\b|(?-i:\bn\b)",
    re.IGNORECASE,
)
_UNIT_WORD = re.compile(r"[A-Za-z¢][A-Za-z.]*(?:\^?-?\d)?")


@dataclass(frozen=True, slots=True)
class WrittenNumber:
    """``unit`` is empty if there is none. ``digits`` are those behind the decimal point of a plain decimal, else None.

    ``literal``: nothing is left to compute, as there is in 3 + 4.
    """

    value: Fraction
    unit: str = ""
    percent: bool = False
    literal: bool = True
    digits: int | None = None

    def equals(self, other: WrittenNumber) -> bool:
        """Equal values and no different units: 25 % equals 0.25 and 25, and 5 cm equals 5, but not 5 km."""
        if self.unit and other.unit and not _same_unit(self.unit, other.unit):
            return False
        scales = (1,) if self.percent == other.percent else (1, 100)
        mine = [(self.value / scale if self.percent else self.value) for scale in scales]
        theirs = [(other.value / scale if other.percent else other.value) for scale in scales]
        decimals = all(each.digits is not None or each.value.denominator == 1 for each in (self, other))
        return any(
            a == b or self._rounds(a, b, decimals) or other._rounds(b, a, decimals)
            for a, b in zip(mine, theirs, strict=True)
        )

    def is_near(self, other: WrittenNumber) -> bool:
        """Whether the values differ by a hundredth at most, as of a number and its decimals."""
        return abs(self.value - other.value) * 100 <= abs(self.value)

    def _rounds(self, mine: Fraction, other: Fraction, decimals: bool) -> bool:
        """Whether this is a decimal with enough digits of the other number, behind the point if both are decimals."""
        if not self.digits or self.percent:
            return False
        written = abs(mine.numerator) * 10**self.digits // mine.denominator
        enough = self.digits if decimals else len(str(written).lstrip("0"))
        return enough >= ROUNDED_DIGITS and abs(mine - other) < Fraction(1, 10**self.digits)


def written_number(text: str) -> WrittenNumber | None:
    """The number that a whole text is, None for any other text."""
    if len(text) > LONGEST:
        return None
    text = _UNIT_FRACTION.sub(_unit_fraction, _MICRO.sub("micro", _OHM.sub(r" \1ohm", plain_math(text))))
    text = _REPEATING.sub(_repeating, text.rstrip(" .,;:?*").lstrip(" ,;:*"))
    text = _CURRENCY_NAME.sub(lambda name: _SIGNS[name.lastgroup or ""], text)
    sign = ""
    if match := re.match(r"[-+]\s*(?=(?:US)?[$€£¥₹])", text):
        sign, text = match[0].strip(), text[match.end() :]
    symbol = ""
    if match := _SYMBOL.match(text):
        symbol, text = _CURRENCIES[match[0]], text[match.end() :].strip()
    core, rest = _split_unit(text)
    core, rest = sign + core.strip().removesuffix("(").rstrip(), rest.strip()
    if match := _SYMBOL.match(rest):
        symbol, rest = _CURRENCIES[match[0]], rest[match.end() :].strip()
    percent = bool(match := re.match(r"(?:%|percent\b|pct\b|per\s+cent\b)", rest, re.IGNORECASE))
    rest = rest[match.end() :].strip() if match else rest
    scale = 1
    if match := re.match(rf"({'|'.join(_MAGNITUDES)})s?\b", rest, re.IGNORECASE):
        scale, rest = _MAGNITUDES[match[1].lower()], rest[match.end() :].strip()
    unit = _unit(rest) if rest else ""
    if unit is None or not core:
        return None
    value = _words(core)
    literal, digits = True, None
    if value is None:
        expression = _exact(core)
        if expression is None or (value := _value(expression)) is None:
            return None
        literal = _LITERAL.fullmatch(expression) is not None
        digits = len(expression.partition(".")[2]) if re.fullmatch(r"[-+]?\d*\.\d+", expression) else None
    return WrittenNumber(value * scale, unit or symbol, percent, literal, digits)


def plain_math(text: str) -> str:
    """A text with ASCII signs and digits in place of other characters and of LaTeX for them."""
    text = _unscripted(unicodedata.normalize("NFC", text))
    text = "".join(map(_folded, text.translate(_CHARACTERS)))
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = re.sub(r"^(?:\$\$?|\\\(|\\\[)\s*([^$]*?)\s*(?:\$\$?|\\\)|\\\])\.?$", r"\1", text.strip())
    return re.sub(r"\s+", " ", text).strip()


def _folded(character: str) -> str:
    """A vulgar fraction as " 1/2", a fullwidth character as its plain one, a digit of another script as 0 to 9."""
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    if unicodedata.east_asian_width(character) == "F":
        return unicodedata.normalize("NFKC", character)
    return str(unicodedata.decimal(character, character))


def _unscripted(text: str) -> str:
    """Superscript and subscript characters as ^{...} and _{...}."""
    for characters, sign in ((_SUPERSCRIPTS, "^"), (_SUBSCRIPTS, "_")):
        text = re.sub(
            f"[{characters}]+",
            lambda match, sign=sign: f"{sign}{{{unicodedata.normalize('NFKC', match[0]).replace(chr(0x2212), '-')}}}",
            text,
        )
    return text


def _split_unit(text: str) -> tuple[str, str]:
    """A number's own characters, and what follows them."""
    if match := re.match(r"[A-Za-z]+(?:[- ](?:and[- ])?(?:[A-Za-z]+))*", text):
        words = re.split(r"[- ]", match[0].lower())
        count = 0
        while count < len(words) and (words[count] in _WORDS or (count and words[count] in {*_MAGNITUDES, "and"})):
            count += 1
        while count and words[count - 1] == "and":
            count -= 1
        at = sum(len(word) + 1 for word in words[:count])
        return text[: max(at - 1, 0)], text[at:] if count else text
    # Up to the first letter that is not part of \frac, of an exponent such as 3.2e5, or of "3 and 1/2".
    number = re.match(r"(?:\\frac|(?<=[\d.])[eE](?=[-+]?\d)|\band\b(?=\s*\d)|[^A-Za-z\\%$€£¥₹¢])*", text)
    end = number.end() if number else 0
    if end and text[end : end + 1].isalpha() and text[end - 1] not in " (" and not _GLUED.match(text, end):
        return text, ""
    return text[:end], text[end:]


def _unit(text: str) -> str | None:
    """A unit, or the things that are counted, in one form; None for a text that is neither."""
    text = text.strip(" .,;:()").replace("{", "").replace("}", "")
    text = re.sub(r"\s*\^\s*", "^", text)
    text = re.sub(r"\bdegrees?\s+(?:[CF]|[Cc]elsius|[Ff]ahrenheit)$", "degrees", text)
    text = re.sub(r"\b(?:square|sq\.?)\s+([A-Za-z]+)", r"\1^2", text)
    text = re.sub(r"\b(?:cubic|cu\.?)\s+([A-Za-z]+)", r"\1^3", text)
    words = re.split(r"\s*[/*]\s*|\s+", text)
    if len(words) > MOST_WORDS or _NO_UNIT.search(text) or not all(map(_UNIT_WORD.fullmatch, words)):
        return None
    text = re.sub(r"\s+per\s+|\s*/\s*", "/", text.lower())
    return " ".join("/".join(_stem(part) for part in word.split("/")) for word in text.split())


def _stem(word: str) -> str:
    base, power, exponent = word.rstrip(".").partition("^")
    singular = base if base in _UNITS else base[:-1] if base.endswith("s") and len(base) > 2 else base
    return _UNITS.get(singular, singular) + power + exponent


def _same_unit(one: str, other: str) -> bool:
    one, other = (
        _UNITS.get(_UNITS.get(unit, unit), unit) for unit in (one.replace("mi/h", "mph"), other.replace("mi/h", "mph"))
    )
    return one == other or set(one.split()) <= set(other.split()) or set(other.split()) <= set(one.split())


def _words(text: str) -> Fraction | None:
    """Seventy-two, one hundred and five."""
    words = [word for word in re.split(r"[\s-]+", text.lower()) if word != "and"]
    if not words or any(word not in _WORDS and word not in _MAGNITUDES for word in words) or words[0] in _MAGNITUDES:
        return None
    total = part = 0
    for at, word in enumerate(words):
        if word == "hundred":
            part *= 100
        elif word in _MAGNITUDES:
            total, part = total + part * _MAGNITUDES[word], 0
        elif at and words[at - 1] in _WORDS and not (_WORDS[words[at - 1]] >= 20 and _WORDS[word] < 10):
            return None
        else:
            part += _WORDS[word]
    return Fraction(total + part)


def _exact(text: str) -> str | None:
    """A number or expression with plain decimals and the signs + - * / ^ ! ( ); None for any other text."""
    text = re.sub(r"\\frac\s*(\d)", r"\\frac{\1}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*(\d)", r"\1{\2}", text)
    text = _MIXED.sub(_mixed, text)
    before = None
    while before != text:
        before = text
        text = re.sub(r"\^\s*\{([^{}]*)\}", r"^(\1)", text)
        text = _FRACTION.sub(lambda m: f"(({m[1]})/({m[2]}))", text)
    text = re.sub(r"(?<=[\d.])[eE]([-+]?\d+)", r"*10^(\1)", text)
    text = re.sub(_NUMBER, lambda match: _decimal(match[0]), text)
    # Digits with a space between them, or a comma that is left, are several numbers.
    if re.search(r"[\d.)]\s+[\d.(]|,", text):
        return None
    text = re.sub(r"\s+", "", text).replace("**", "^")
    return text if re.fullmatch(r"[-+*/^!().\d]+", text) else None


def _mixed(match: re.Match[str]) -> str:
    units, top, bottom = match[1], match[2] or match[4], match[3] or match[5]
    return f"({units}+{top}/{bottom})" if int(top) < int(bottom) else match[0]


def _repeating(match: re.Match[str]) -> str:
    units, once, again = match[1], match[2], match[3] or match[4]
    nines = int("9" * len(again)) * 10 ** len(once)
    return f"({int(units + once + again) - int(units + once or 0)}/{nines})"


def _unit_fraction(match: re.Match[str]) -> str:
    """A quotient of two units in one line; of two variables as it is."""
    known = all(_UNITS.get(_stem(name)) for name in match.group(1, 2))
    return f"{match[1]}/{match[2]}{f'^{match[3]}' if match[3] else ''}" if known else match[0]


def _decimal(text: str) -> str:
    """Digits with a decimal point only."""
    if not _THOUSANDS.fullmatch(text):
        return text.replace(",", ".")
    commas, points = text.count(","), text.count(".")
    decimal = "," if (points and commas == 1 and text.rfind(",") > text.rfind(".")) else "."
    if not points and commas == 1 and re.search(r"[ '_]", text):
        decimal = ","
    if points > 1 and not commas:
        decimal = ""
    return "".join("." if c == decimal else c for c in text if c.isdigit() or c == decimal)


_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def _value(expression: str) -> Fraction | None:
    """The exact value of an expression of `_exact`; None for one that is none, or too large.

    Python's parser reads it, with names for numbers, an attribute for a factorial, and a sign before a bracket that
    multiplies.
    """
    numbers: list[str] = []

    def named(number: re.Match[str]) -> str:
        numbers.append(number[0])
        return f" n{len(numbers) - 1} "

    source = re.sub(r"(?<=[\d.)!])\(", "*(", expression)
    source = re.sub(r"\d+\.?\d*|\.\d+", named, source).replace("^", "**").replace("!", ".factorial")
    try:
        return _computed(ast.parse(source.strip(), mode="eval").body, numbers)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _computed(node: ast.expr, numbers: Sequence[str]) -> Fraction:
    """Raises ValueError for anything but numbers, signs and factorials, and for a value that is too large."""
    match node:
        case ast.Name(id=name):
            return Fraction(numbers[int(name[1:])])
        case ast.UnaryOp(op=sign, operand=operand):
            value = _computed(operand, numbers)
            return -value if isinstance(sign, ast.USub) else value
        case ast.Attribute(value=operand, attr="factorial"):
            value = _computed(operand, numbers)
            if value.denominator == 1 and 0 <= value <= LARGEST_FACTORIAL:
                return Fraction(math.factorial(int(value)))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = _computed(left, numbers), _computed(right, numbers)
            size = max(base.numerator.bit_length(), base.denominator.bit_length())
            if exponent.denominator == 1 and size * abs(exponent) <= LARGEST:
                return base**exponent.numerator
        case ast.BinOp(left=left, op=sign, right=right) if (operation := _OPERATIONS.get(type(sign))) is not None:
            value = operation(_computed(left, numbers), _computed(right, numbers))
            if max(value.numerator.bit_length(), value.denominator.bit_length()) <= LARGEST:
                return value
    raise ValueError("no number, or one that is too large")
