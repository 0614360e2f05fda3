"""The table of supported families is that of the code, and the README leads to it."""

import re
from pathlib import Path

from megasync.layout.families import FAMILIES
from megasync.layout.families.delta_net import DELTA
from megasync.layout.families.dense import DENSE
from megasync.layout.families.experts import SPARSE
from megasync.layout.families.latent import LATENT

ROOT = Path(__file__).parents[2]
MODULES = {"dense.py": DENSE, "experts.py": SPARSE, "latent.py": LATENT, "delta_net.py": DELTA}


def test_every_family_has_a_row_with_its_module():
    page = (ROOT / "docs" / "families.md").read_text()
    section = page.partition("## Supported families\n")[2].partition("\n\n**")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    named = {re.match(r" `([a-z0-9_]+)`", row[1]).group(1): row[3].strip(" `") for row in rows[0:]}
    named.pop("model_type", None)
    assert named == {name: module for module, families in MODULES.items() for name in families}
    assert set(named) == set(FAMILIES)


def test_the_readme_leads_to_the_table_and_counts_it_right():
    text = (ROOT / "README.md").read_text()
    assert "docs/families.md#supported-families" in text
    assert "Twenty model families" in text and len(FAMILIES) == 20
