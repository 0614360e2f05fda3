"""The quickstart from a wheel, in a folder where there is nothing, learns its task."""

import os
import subprocess
import sys
import sysconfig

import pytest
from wheels import build, copied

pytestmark = pytest.mark.real


def test_the_quickstart_learns_from_a_wheel(tmp_path):
    """The packages of runs are those of this environment: installing them again would take minutes and the network."""
    env, place = tmp_path / "an environment", tmp_path / "a folder"
    place.mkdir()
    wheel = build("wheel", copied(tmp_path / "source"), tmp_path / "dist")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True, timeout=300)
    (packages,) = env.glob("lib/python3.*/site-packages")
    install = ["install", "--no-deps", "--no-index", "-q", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", env / "bin" / "python", *install], check=True, timeout=300)
    (packages / "runs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [env / "bin" / "megasync", "quickstart"]
    done = subprocess.run(command, cwd=place, env=settings, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (place / "runs").glob("quickstart-*")
    assert (run / "export" / "config.json").is_file() and (place / "models" / "digits" / "config.json").is_file()
