"""A service's file of keys."""

import pytest

from megasync.errors import ConfigError
from megasync.tenants.checks import draw_tenants, read_tenants

GOOD = "tml-" + "a" * 16


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names no tenant"),
        ("# only a comment\n", "names no tenant"),
        (f"lab {GOOD} more\n", "line 1 has 3 words"),
        (f"lab/x {GOOD}", "line 1: a tenant's name"),
        ("lab sk-0123456789abcdef0123", "line 1: the key of lab must be tml-"),
        ("lab tml-short", "at least 16"),
        (f"lab {GOOD}\n\nlab {GOOD}b", "line 3: lab or its key stands on an earlier line"),
        (f"lab {GOOD}\nother {GOOD}", "line 2: other or its key"),
    ],
)
def test_a_file_of_tenants_is_refused_by_its_line_and_no_key_is_shown(tmp_path, text, said):
    (file := tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_tenants(file)
    assert said in str(caught.value) and GOOD not in str(caught.value) and "0123456789abcdef" not in str(caught.value)


def test_tenants_have_the_keys_of_their_lines_and_a_drawn_file_can_be_read(tmp_path):
    (file := tmp_path / "keys").write_text(f"# ours\nlab.1 {GOOD}\n\nother {GOOD}b\n")
    assert read_tenants(file) == {"lab.1": GOOD, "other": f"{GOOD}b"}
    first, second = draw_tenants(), draw_tenants()
    assert first != second
    file.write_text(first)
    assert list(read_tenants(file)) == ["local"]
