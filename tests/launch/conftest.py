"""A configuration that could be started: the quickstart's, with a model of its own. A Slurm that knows any node."""

from pathlib import Path

import pytest

from megasync.config import load_config, save_config
from megasync.models import fetch

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


@pytest.fixture(scope="session")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launch")
    model = fetch("digits", folder / "digits")
    save_config(load_config(QUICKSTART, [f"model.path={model}", "cluster.device=cpu"]), folder / "run.yaml")
    return folder / "run.yaml"


@pytest.fixture
def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shows a list of nodes as it is given, one a line. The folder that it is in."""
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
