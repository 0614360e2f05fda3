"""An encyclopaedia of a country that does not exist, and questions about it, all drawn from one seed.

Every name is made up, so no model can know an answer: it has to be found. A question follows a chain of facts, each on
a page of its own: the value of one is the page of the next, and the last value is the answer.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from deepresearch.documents import Document

# In the order in which their pages refer to each other: each page names pages of the kinds before it.
SIZES = {"mountain": 16, "river": 32, "town": 72, "person": 110, "book": 90}
SURNAME_ENDINGS = ["ck", "lt", "nd", "rn"]

BEGINNINGS = [
    "Bal",
    "Cor",
    "Dre",
    "Esk",
    "Fal",
    "Gor",
    "Hul",
    "Ing",
    "Jor",
    "Kel",
    "Lum",
    "Mar",
    "Nev",
    "Ost",
    "Pel",
    "Quin",
    "Ros",
    "Sel",
    "Tor",
    "Ulf",
    "Var",
    "Wen",
    "Yor",
    "Zan",
]
MIDDLES = ["a", "e", "i", "o", "u", "ari", "eno", "ila", "ora", "umi"]
ENDINGS = {
    "mountain": ["grat", "horn", "spitz", "fell"],
    "river": ["ssa", "lune", "rith", "dwy"],
    "town": ["burg", "holm", "stead", "wick", "mouth"],
    "person": ["dan", "lia", "mir", "nes", "rik", "sa", "tha", "vin"],
    "book": ["nik", "bar", "dil", "mon"],
}
CRAFTS = [
    "bell founding",
    "boat building",
    "bookbinding",
    "candle making",
    "glass blowing",
    "rope making",
    "tanning",
    "weaving",
]
CALLINGS = ["an astronomer", "a botanist", "a cartographer", "a clockmaker", "a poet", "a surgeon", "a translator"]
NOUNS = [
    "Lantern",
    "Orchard",
    "Ferry",
    "Almanac",
    "Winter",
    "Bridge",
    "Harbour",
    "Garden",
    "Letter",
    "Compass",
    "Mill",
    "Voyage",
]


class Fact(NamedTuple):
    """A fact of the page `title`: its `relation` is `value`. The relation is a word of the page."""

    title: str
    relation: str
    value: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question whose answer is the value of its last fact."""

    text: str
    facts: tuple[Fact, ...]

    @property
    def subject(self) -> str:
        return self.facts[0].title

    @property
    def answer(self) -> str:
        return self.facts[-1].value

    def row(self, ids: Mapping[str, str]) -> dict:
        """The question as a row of a dataset; `ids` has the documents' ids by title."""
        evidence = [ids[fact.title] for fact in self.facts]
        return {"prompt": self.text, "answers": [self.answer], "subject": self.subject, "evidence": evidence}


def encyclopaedia(seed: int = 0) -> tuple[list[Document], list[Question]]:
    """320 pages, and the questions that one or two of them answer; the same for the same seed."""
    chance = random.Random(f"encyclopaedia {seed}")
    names = _names(chance)
    pages = {kind: [_PAGES[kind](name, names, chance) for name in names[kind]] for kind in SIZES}
    by_title = {page["title"]: page for of_kind in pages.values() for page in of_kind}
    documents = [
        Document(f"{kind}-{number:03d}", page["title"], page["text"])
        for kind, of_kind in pages.items()
        for number, page in enumerate(of_kind)
    ]
    questions = [question for page in by_title.values() for question in _questions(page, by_title)]
    # An evaluation takes the first ones.
    chance.shuffle(questions)
    return documents, questions


def _names(chance: random.Random) -> dict[str, list[str]]:
    """No two alike, over all kinds."""
    taken: set[str] = set()
    names: dict[str, list[str]] = {}
    for kind, count in SIZES.items():
        names[kind] = []
        while len(names[kind]) < count:
            name = chance.choice(BEGINNINGS) + chance.choice(MIDDLES) + chance.choice(ENDINGS[kind])
            if kind == "person":
                name += f" {chance.choice(BEGINNINGS)}{chance.choice(MIDDLES)}{chance.choice(SURNAME_ENDINGS)}"
            if kind == "book":
                name = f"The {chance.choice(NOUNS)} of {name}"
            if name not in taken:
                taken.add(name)
                names[kind].append(name)
    return names


def _mountain(name: str, names: dict, chance: random.Random) -> dict:
    height = chance.randint(1200, 4100)
    return {
        "title": name,
        "text": f"{name} is a mountain of Vessaly, {height} metres high. Its summit was first reached in "
        f"{chance.randint(1720, 1890)}. A hut below the north face is open in summer, and snow lies on the upper "
        f"slopes until June.",
    }


def _river(name: str, names: dict, chance: random.Random) -> dict:
    source = chance.choice(names["mountain"])
    return {
        "title": name,
        "source": source,
        "text": f"The {name} is a river of Vessaly, {chance.randint(40, 380)} kilometres long. It rises on the slopes "
        f"of {source}. Barges carry timber and salt on its lower course. In dry years the upper {name} can be crossed "
        "on foot.",
    }


def _town(name: str, names: dict, chance: random.Random) -> dict:
    river, founded = chance.choice(names["river"]), chance.randint(1080, 1690)
    return {
        "title": name,
        "river": river,
        "founded": str(founded),
        "text": f"{name} is a town in Vessaly. It lies on the river {river} and was founded in {founded}. For a long "
        f"time the people of {name} lived by {chance.choice(CRAFTS)}. A fair is held on the market square every "
        f"autumn, and the old town wall is still standing. About {chance.randint(2, 60)} thousand people live "
        "there today.",
    }


def _person(name: str, names: dict, chance: random.Random) -> dict:
    town, born = chance.choice(names["town"]), chance.randint(1700, 1880)
    return {
        "title": name,
        "birthplace": town,
        "born": str(born),
        "text": f"{name} was {chance.choice(CALLINGS)} from Vessaly. {name} was born in the town of {town} in {born}, "
        f"the {chance.choice(['first', 'second', 'third', 'fourth'])} child of a family of shopkeepers. Letters to "
        f"friends abroad tell of long travels and of poor health. A street in the capital has been named after {name}.",
    }


def _book(name: str, names: dict, chance: random.Random) -> dict:
    author = chance.choice(names["person"])
    return {
        "title": name,
        "author": author,
        "text": f"{name} is a novel in {chance.randint(2, 5)} parts. It was written by {author} and was printed in "
        f"{chance.randint(1760, 1930)}. Critics praised its portraits of country life. A play was made of it, which "
        f"was never put on stage.",
    }


_PAGES = {"mountain": _mountain, "river": _river, "town": _town, "person": _person, "book": _book}


# The key of a page, the word for it in a search, and the question.
_ONE = [
    ("source", "rises", "On which mountain does the river {} rise?"),
    ("river", "river", "On which river does the town of {} lie?"),
    ("founded", "founded", "In which year was the town of {} founded?"),
    ("birthplace", "born", "In which town was {} born?"),
    ("author", "written", "Who wrote {}?"),
]
# The key of a page, that of the page which it names, and the question.
_TWO = [
    ("river", "source", "On which mountain does the river that flows through {} rise?"),
    ("birthplace", "river", "On which river does the birthplace of {} lie?"),
    ("author", "birthplace", "In which town was the author of {} born?"),
]


def _questions(page: dict, pages: Mapping[str, dict]) -> list[Question]:
    title = page["title"]
    words = {key: word for key, word, _ in _ONE}

    def fact(title: str, key: str) -> Fact:
        return Fact(title, words[key], pages[title][key])

    one = [Question(text.format(title), (fact(title, key),)) for key, _, text in _ONE if key in page]
    two = [
        Question(text.format(title), (fact(title, key), fact(page[key], further)))
        for key, further, text in _TWO
        if key in page
    ]
    return one + two
