"""The rules of keys: what a key of `schema` needs, excludes or leaves unused. Data at the key, and one evaluator.

A field is declared with `key(default, limit, *rules)`. Its rules read like a sentence that begins with the key:

    sequence_parallel: bool = key(False, needs("trainer.tensor_parallel", above(1), because="it splits ..."))

- `needs(other, condition)`: where this key is set, the other must meet the condition. Without one, it must be set too.
- `excludes(other, condition)`: where this key is set, the other must not meet the condition, or must not be set.
- `unused_without(other, condition)`: as `needs`, where the key would otherwise have no effect.
- `at_most`, `at_least`, `below`, `longer_than`, `as_many_as`, `multiple_of`, `divides`: relations of numbers, with sums
  of products such as "trainer.data_parallel * trainer.minibatches". They hold for each value, unless in a `when`.
- `when(condition, *rules)`: the rules hold for values of this key that meet the condition.
- `where={other: condition}`: a rule holds only if other keys meet these conditions too.

A key is *set* if it differs from its default. A plain value, or several, stands for the condition of being equal to it.
A name that begins with a dot is a key of the same section. "model's experts" and other names with a blank are facts
that the caller of `check_rules` knows; a rule about an unknown fact is not checked. "rollout.server_args --flag" is the
first argument that begins so.

Every refusal names both keys, their values and changes each of which is then accepted (`Refusal.fixes`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any

from omegaconf import MISSING as REQUIRED

from megasync.config.limits import Limit, as_typed, limit_of, schema_fields
from megasync.errors import ConfigError

# Changes that a refusal of numbers suggests at most.
MOST_FIXES = 3
# No value: an unknown fact, or no example of a condition.
UNKNOWN: Any = object()


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a value, with a value for which it holds and one for which it does not.

    ``words`` follow the name of a key.
    """

    test: Callable[[Any], bool]
    words: str
    example: Any = UNKNOWN
    opposite: Any = UNKNOWN


def one_of(*values: Any) -> Condition:
    return Condition(lambda value: value in values, f"={' or '.join(map(as_typed, values))}", values[0])


def none_of(*values: Any, instead: Any = UNKNOWN) -> Condition:
    """Any other value, such as ``instead``."""
    words = f" other than {' and '.join(map(as_typed, values))}"
    return Condition(lambda value: value not in values, words, instead, values[0])


def above(bound: float) -> Condition:
    return Condition(lambda value: value is not None and value > bound, f" above {bound:g}", bound + 1, bound)


def between(low: float, high: float) -> Condition:
    return Condition(lambda value: low <= value <= high, f" from {low:g} to {high:g}", high)


def having(entry: Any) -> Condition:
    """A list with this entry."""
    return Condition(lambda value: entry in value, f" with {entry}", [entry], [])


# Text that says which device computes; auto is resolved before ranks start.
GPU = none_of("cpu", instead="cuda")


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a configuration is refused. Each of ``fixes`` (key, value) resolves it alone."""

    message: str
    keys: tuple[str, ...]
    fixes: tuple[tuple[str, Any], ...]


@dataclass(frozen=True, slots=True)
class View:
    """The values that rules read: a configuration, and facts about its model and machines."""

    config: Any
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def value(self, key: str) -> Any:
        """The value of a key, or of a fact; UNKNOWN if nothing is known about it."""
        if key in self.facts:
            return self.facts[key]
        name, _, flag = key.partition(" ")
        if flag and not flag.startswith("--"):
            return UNKNOWN
        node = self.config
        for part in name.split("."):
            if node is None:
                return None
            node = node.get(part) if isinstance(node, Mapping) else getattr(node, part)
        return next((argument for argument in node or () if argument.startswith(flag)), None) if flag else node

    def item(self, key: str) -> tuple[Any, Limit | None]:
        """Default and limit of a key; UNKNOWN for facts and for entries of a dictionary."""
        section, _, name = key.rpartition(".")
        holder = None if " " in key else self.value(section) if section else self.config
        items = schema_fields(holder) if is_dataclass(holder) else ()
        item = next((each for each in items if each.name == name), None)
        return (UNKNOWN, None) if item is None else (default_of(item), limit_of(item))

    def is_set(self, key: str) -> bool:
        """Whether a key differs from its default; a fact or an entry of a dictionary, whether it is anything."""
        value, default = self.value(key), self.item(key)[0]
        return bool(value) if default is UNKNOWN else value != default

    def meets(self, key: str, condition: Condition | None) -> bool:
        return self.is_set(key) if condition is None else condition.test(self.value(key))


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule about one other key (``form`` is needs, excludes or unused), or of numbers (``form`` is an operator)."""

    form: str
    other: str
    condition: Condition | None = None
    because: str = ""
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # Holds where the run trains, and not where servers are only started.
    training: bool = False
    # For which values of the key; None: if it is set.
    when: Condition | None = None
    # Of a relation: what is compared, if not the key alone.
    left: str = ""

    def refusal(self, view: View, key: str) -> Refusal | None:
        """The refusal of a configuration that breaks the rule; None if it holds, or does not apply."""
        near = key.rpartition(".")[0]
        where = {_absolute(other, near): condition for other, condition in self.where.items()}
        rule = replace(self, other=_absolute(self.other, near), left=_absolute(self.left, near), where=where)
        for other, condition in where.items():
            if view.value(other) is UNKNOWN or not view.meets(other, _condition(condition)):
                return None
        relation = self.form in RELATIONS
        if self.when is SET or (self.when is None and not relation):
            applies = view.is_set(key)
        else:
            applies = self.when is None or self.when.test(view.value(key))
        if not applies:
            return None
        return rule._unequal(view, key) if relation else rule._unmet(view, key)

    def _unmet(self, view: View, key: str) -> Refusal | None:
        other = view.value(self.other)
        if other is UNKNOWN or view.meets(self.other, self.condition) != (self.form == "excludes"):
            return None
        # The other key first: a key that is set is probably wanted.
        wanted = True if other is False else UNKNOWN
        if self.form == "excludes":
            wanted = _unlike(self.condition, view.item(self.other)[0])
        elif self.condition is not None:
            wanted = self.condition.example
        both = ((self.other, wanted), (key, _unlike(self.when, view.item(key)[0])))
        fixes = [(name, fix) for name, fix in both if fix is not UNKNOWN and not _is_fact(name)]
        setting, there = shown(key, view.value(key)), shown(self.other, other)
        if _is_fact(self.other):
            said = self._about_fact(setting, other)
        elif self.form == "unused":
            said = f"{setting} has no effect with {there}"
        elif self.form == "excludes":
            said = f"{setting} and {there} exclude each other"
        else:
            words = self.condition.words if self.condition else " to be set"
            said = f"{setting} needs {self.other}{words}, but {there}"
        return self._refusal(said, view, (key, self.other), fixes)

    def _about_fact(self, given: str, value: Any) -> str:
        whose, _, what = self.other.partition("'s ")
        if self.condition is not None:
            verb = "is not supported where" if self.form == "excludes" else "needs that"
            words = self.condition.words.strip(" =")
            return f"{given} {verb} the {self.other} is {words}, but it is {as_typed(value)}"
        if self.form == "excludes":
            return f"{given} does not support {what}, which the {whose} has"
        return f"{given} needs {what}, and the {whose} has none"

    def _unequal(self, view: View, key: str) -> Refusal | None:
        left, (words, holds) = self.left or key, RELATIONS[self.form]
        sides = _total(left, view), _total(self.other, view)
        if None in sides or holds(*sides):
            return None
        names = dict.fromkeys(name for side in (left, self.other) for term in _terms(side) for name in term)
        names = [name for name in names if not _number(name)]
        ordered = sorted(names, key=lambda name: name != key)
        fixes = [fix for name in ordered if (fix := self._fitting(view, name, left, holds)) is not None][:MOST_FIXES]
        texts = [
            f"{' + '.join(' * '.join(_named(name, view) for name in term) for term in _terms(side))}"
            + (f" = {total:g}" if " " in side and not _is_fact(side) else "")
            for side, total in zip((left, self.other), sides, strict=True)
        ]
        said = f"{texts[0]} must be {words} {texts[1]}"
        if left != key and key not in names:
            said = f"{shown(key, view.value(key))}: {said}"
        return self._refusal(said, view, dict.fromkeys((key, *names)), fixes)

    def _fitting(self, view: View, name: str, left: str, holds: Callable[[Any, Any], bool]) -> tuple[str, Any] | None:
        """A value of one number with which the relation holds; None if there is none within the key's limit.

        Both sides are linear in each number, so their difference is zero at one value, and one beside it fits.
        """
        current, (_, limit) = view.value(name), view.item(name)
        if _is_fact(name) or isinstance(current, bool) or not isinstance(current, int | float):
            return None

        def sides(number: float) -> tuple[Any, Any]:
            changed = View(view.config, {**view.facts, name: number})
            return _total(left, changed), _total(self.other, changed)

        if self.form in ("multiple", "divides"):
            candidates = [number for number in sides(current) if number is not None] + [1]
        else:
            gaps = [operator.sub(*sides(number)) for number in (0.0, 1.0)]
            if not (slope := gaps[1] - gaps[0]):
                return None
            zero = -gaps[0] / slope
            candidates = [math.floor(zero), math.ceil(zero), math.floor(zero) - 1, math.ceil(zero) + 1]
            if isinstance(current, float):
                candidates = [zero, *candidates]
        for number in candidates:
            value = int(number) if isinstance(current, int) else float(number)
            if holds(*sides(value)) and (limit is None or limit.refusal(value) is None):
                return name, value
        return None

    def _refusal(self, said: str, view: View, keys: Collection[str], fixes: Collection[tuple[str, Any]]) -> Refusal:
        others = [shown(name, view.value(name)) for name in self.where if not _is_fact(name) and name not in keys]
        where = f" where {' and '.join(others)}" if others else ""
        because = f": {self.because}" if self.because else ""
        fix = ", or ".join(f"{'set ' * (not index)}{shown(*each)}" for index, each in enumerate(fixes))
        return Refusal(f"{said}{where}{because}; {fix or 'change one of them'}", (*keys, *self.where), tuple(fixes))

    def names(self, key: str) -> list[str]:
        """The other keys and facts that the rule of a key reads."""
        near = key.rpartition(".")[0]
        sides = [_absolute(side, near) for side in (self.left, self.other, *self.where) if side]
        return [name for side in sides for term in _terms(side) for name in term if not _number(name)]

    def words(self, section: str) -> str:
        """The rule of a key of a section as Markdown, without the key."""
        conditions = {_absolute(name, section): _condition(condition) for name, condition in self.where.items()}
        tail = "".join(f", where {_meeting(name, condition)}" for name, condition in conditions.items())
        other, left = _absolute(self.other, section), _absolute(self.left, section)
        if self.form in RELATIONS:
            said = f"{f'{_marked(left)} is ' if left else ''}{RELATIONS[self.form][0]} {_marked(other)}"
        else:
            verb = {"needs": "needs", "excludes": "excludes", "unused": "no effect without"}[self.form]
            said = f"{verb} {_meeting(other, self.condition)}"
        head = f"{self.when.words.strip(' =')}: " if self.when not in (None, SET) else ""
        return f"{head}{said}{tail}" + (f" ({self.because})" if self.because else "")


# The key is set: for `when`, where rules of numbers would hold for every value.
SET = Condition(bool, " set")
# By form of a relation: its words, and its test.
RELATIONS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "<=": ("at most", operator.le),
    ">=": ("at least", operator.ge),
    "<": ("less than", operator.lt),
    ">": ("longer than", operator.gt),
    "==": ("as many as", operator.eq),
    "multiple": ("a multiple of", lambda left, right: not left or (bool(right) and left % right == 0)),
    "divides": ("a divisor of", lambda left, right: right % left == 0),
}


def _about(form: str) -> Callable[..., Rule]:
    return lambda other, *condition, **options: Rule(form, other, _condition(condition), **options)


needs, excludes, unused_without = map(_about, ("needs", "excludes", "unused"))
at_most, at_least, below = (partial(Rule, form) for form in ("<=", ">=", "<"))
multiple_of, divides = partial(Rule, "multiple"), partial(Rule, "divides")
as_many_as = partial(Rule, "==", when=SET)


def longer_than(other: str, because: str, **where: Any) -> Rule:
    """A deadline that contains other waits: a shorter one would end a run, or blame a part, within its own limits."""
    return Rule(">", other, because=because, training=True, **where)


def when(condition: Any, *rules: Rule) -> tuple[Rule, ...]:
    return tuple(replace(rule, when=_condition(condition)) for rule in rules)


def key(default: Any, *parts: Limit | Rule | tuple[Rule, ...], fixed: str = "", megatron: str = "") -> Any:
    """A key of the configuration: its default (or what makes it), its limit if it has one, and its rules.

    ``fixed`` says why a run cannot change it when it is resumed, and what to do instead; all other keys may change.
    ``megatron`` names the fields of Megatron's classes that it decides, beside one of its own name; a * is any text.
    """
    limits = [part for part in parts if not isinstance(part, Rule | tuple)]
    rules = [rule for part in parts if isinstance(part, Rule | tuple) for rule in _each(part)]
    metadata = {"limit": limits[0] if limits else None, "rules": tuple(rules), "fixed": fixed, "megatron": megatron}
    return _field(default, metadata)


def section(default: Any, *rules: Rule, read_where: Mapping[str, Any] | None = None, fixed: str = "") -> Any:
    """A section: each of its keys has these rules too. Rules below it apply only where ``read_where`` holds."""
    return _field(default, {"below": rules, "read_where": read_where or {}, "fixed": fixed})


def _field(default: Any, metadata: dict[str, Any]) -> Any:
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def rules_of(view: View, node: Any, prefix: str = "", above: tuple[Rule, ...] = ()) -> Iterator[tuple[str, Rule]]:
    """Each rule that applies to the keys below a section of a configuration, with its key."""
    for item in schema_fields(node):
        name, value = f"{prefix}{item.name}", getattr(node, item.name)
        below = (*above, *item.metadata.get("below", ()))
        if not all(view.meets(other, _condition(each)) for other, each in item.metadata.get("read_where", {}).items()):
            continue
        yield from ((name, rule) for rule in item.metadata.get("rules", ()))
        if is_dataclass(value):
            yield from rules_of(view, value, f"{name}.", below)
            continue
        yield from ((name, rule) for rule in above)
        if isinstance(value, Mapping):
            for entry, each in value.items():
                if is_dataclass(each):
                    yield from rules_of(view, each, f"{name}.{entry}.", below)


def refusals(
    config: Any,
    facts: Mapping[str, Any],
    *,
    within: Collection[str] = ("",),
    without: Collection[str] = (),
    training: bool = True,
    readable: Collection[str] = ("",),
) -> Iterator[Refusal]:
    """Yields the refusal of each rule that a configuration breaks, in the order of the schema.

    ``within`` and ``without`` are sections or keys whose rules are read. Rules about keys that are not among those
    ``readable`` are not checked. Without ``training`` only servers are started.
    """
    view = View(config, facts)
    for name, rule in rules_of(view, config):
        if not _among(name, within) or _among(name, without) or (rule.training and not training):
            continue
        if not all(_is_fact(other) or _among(other, readable) for other in rule.names(name)):
            continue
        if (refusal := rule.refusal(view, name)) is not None:
            yield refusal


def check_rules(config: Any, facts: Mapping[str, Any] | None = None, **scope: Any) -> None:
    """Raises ConfigError, with a line for each rule that a configuration breaks; arguments as for `refusals`."""
    if broken := [refusal.message for refusal in refusals(config, facts or {}, **scope)]:
        raise ConfigError("\n".join(dict.fromkeys(broken)))


def shown(name: str, value: Any) -> str:
    """A key and its value for a message, without secrets; of a section its name alone."""
    if is_dataclass(value) or " --" in name:
        return name if is_dataclass(value) else f"{name.partition(' ')[0]} {value}"
    if isinstance(value, Mapping) and any(map(is_dataclass, value.values())):
        return f"{name} ({', '.join(map(str, value))})"
    return f"{name}={value:.10g}" if isinstance(value, float) else f"{name}={as_typed(value)}"


def _each(part: Rule | tuple[Rule, ...]) -> tuple[Rule, ...]:
    return (part,) if isinstance(part, Rule) else part


def _condition(value: Any) -> Condition | None:
    """Plain values as a condition; none at all: that the key is set."""
    values = value if isinstance(value, tuple) else (value,)
    if values and isinstance(values[0], Condition):
        return values[0]
    return one_of(*values) if values else None


def _unlike(condition: Condition | None, default: Any) -> Any:
    """A value that does not meet a condition (None: that the key is set), the default if possible; else UNKNOWN."""
    if default not in (UNKNOWN, REQUIRED) and (condition is None or not condition.test(default)):
        return default
    return UNKNOWN if condition is None else condition.opposite


def _absolute(names: str, near: str) -> str:
    """Names in a text, of which those that begin with a dot are keys of the section ``near``."""
    return " ".join(f"{near}{name}" if name.startswith(".") else name for name in names.split(" "))


def _is_fact(name: str) -> bool:
    return "'s " in name or name.startswith("the ")


def _among(name: str, places: Collection[str]) -> bool:
    """Whether a key is one of some keys, or in one of some sections; "" is all."""
    return any(not place or name == place or name.startswith(f"{place}.") for place in places)


def _terms(text: str) -> list[list[str]]:
    return [term.split(" * ") for term in text.split(" + ")]


def _number(name: str) -> bool:
    return name.replace(".", "", 1).isdigit()


def _total(text: str, view: View) -> Any:
    """The sum of products; a list counts its entries. None if a key is null or a fact unknown."""
    total = 0
    for term in _terms(text):
        factors = [float(name) if _number(name) else view.value(name) for name in term]
        if any(factor is None or factor is UNKNOWN for factor in factors):
            return None
        total += math.prod(len(factor) if isinstance(factor, list) else factor for factor in factors)
    return total


def _named(name: str, view: View) -> str:
    return name if _number(name) else shown(name, view.value(name))


def _marked(text: str) -> str:
    return " + ".join(
        " x ".join(name if _number(name) or _is_fact(name) else f"`{name}`" for name in term) for term in _terms(text)
    )


def _meeting(name: str, condition: Condition | None) -> str:
    words = condition.words if condition is not None else ""
    if _is_fact(name):
        return name.removeprefix("model's ") + words
    return f"`{name}{words}`" if words.startswith("=") else f"`{name}`{words}"
