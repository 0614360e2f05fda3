"""An encyclopaedia of a country that does not exist, and questions about it, all drawn from one seed.

Every name is made up, so no model can know an answer: it has to be found. Invariant: a question belongs to the training
or to the held-out split by the hash of what it asks about, so the two never ask for the same fact.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from deepresearch.documents import Document

# In the order in which their pages refer to each other: each page names pages of the kinds before it.
SIZES = {"mountain": 16, "river": 32, "town": 72, "person": 110, "book": 90}
HELD_OUT_SHARE = 5  # one subject in so many is held out

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


@dataclass(frozen=True, slots=True)
class Question:
    """`hops` is the number of pages that have to be read to answer it."""

    text: str
    answer: str
    hops: int
    subject: str

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.subject.encode()).digest()[0] % HELD_OUT_SHARE == 0

    def row(self) -> dict:
        """As a row of a dataset."""
        return {"prompt": self.text, "answers": [self.answer], "hops": self.hops}


def encyclopaedia(seed: int = 0) -> tuple[list[Document], list[Question]]:
    """320 pages, and the questions that one or two of them answer; the same for the same seed."""
    chance = random.Random(f"encyclopaedia {seed}")
    names = _names(chance)
    pages = {kind: [_PAGES[kind](name, names, chance) for name in names[kind]] for kind in SIZES}
    facts = {page["title"]: page for of_kind in pages.values() for page in of_kind}
    documents = [
        Document(f"{kind}-{number:03d}", page["title"], page["text"])
        for kind, of_kind in pages.items()
        for number, page in enumerate(of_kind)
    ]
    questions = [question for page in facts.values() for question in _questions(page, facts)]
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
                name += f" {chance.choice(BEGINNINGS)}{chance.choice(MIDDLES)}{chance.choice(['ck', 'lt', 'nd', 'rn'])}"
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


def _questions(page: dict, facts: dict[str, dict]) -> list[Question]:
    title = page["title"]
    found: list[tuple[str, str, int]] = []
    if "source" in page:
        found.append((f"On which mountain does the river {title} rise?", page["source"], 1))
    if "river" in page:
        found.append((f"On which river does the town of {title} lie?", page["river"], 1))
        found.append((f"In which year was the town of {title} founded?", page["founded"], 1))
        found.append(
            (f"On which mountain does the river that flows through {title} rise?", facts[page["river"]]["source"], 2)
        )
    if "birthplace" in page:
        found.append((f"In which town was {title} born?", page["birthplace"], 1))
        found.append((f"On which river does the birthplace of {title} lie?", facts[page["birthplace"]]["river"], 2))
    if "author" in page:
        found.append((f"Who wrote {title}?", page["author"], 1))
        found.append((f"In which town was the author of {title} born?", facts[page["author"]]["birthplace"], 2))
    return [Question(text, answer, hops, title) for text, answer, hops in found]
