"""A fake scontrol that knows every node."""

from pathlib import Path

import pytest
from quickstart_config import config_file

__all__ = ["config_file", "fake_scontrol"]


@pytest.fixture
def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Prints the given node list, one node per line. Returns the folder that holds the program."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    path = folder / "scontrol"
    path.write_text(
        "#!/usr/bin/env bash\n"
        'case "$2 $3" in\n'
        "  *bad) echo no such list >&2; exit 1 ;;\n"
        '  hostnames*) printf "%s\\n" ${3//,/ } ;;\n'
        '  node*) echo "NodeName=$3 Arch=x86_64 NodeAddr=10.0.0.${3#n} NodeHostName=$3" ;;\n'
        "esac\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return folder
