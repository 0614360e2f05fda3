"""What `megasync init` writes, trained for three steps from a folder outside the checkout, by each template."""

from __future__ import annotations

import pytest

from megasync.starters import TEMPLATES, find_model, run_files, write_run
from megasync.starters import folder as folder_module
from megasync.starters.fetch import fetch

# A model of 135 million weights answers slowly beside other work.
pytestmark = [pytest.mark.real, pytest.mark.timeout(1200)]

SMALL = ("schedule.groups_per_step=2", "schedule.samples_per_group=2", "eval.samples=2", "observe.live=false")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    return fetch("smollm2", tmp_path_factory.mktemp("models") / "smollm2")


@pytest.mark.parametrize("template", TEMPLATES)
def test_three_steps_of_a_template(template, digits_model, request, launch, tmp_path, monkeypatch) -> None:
    model = find_model(TEMPLATES[template].model)

    def link(name, out) -> None:
        out.parent.mkdir(parents=True)
        out.symlink_to(digits_model if name == "digits" else request.getfixturevalue(name))

    monkeypatch.setattr(folder_module, "fetch", link)
    folder = tmp_path / "my run"
    write_run(folder, run_files(template, model, 0, "mine"), model)
    monkeypatch.chdir(folder)
    started = []
    if takes := TEMPLATES[template].takes:
        supervised = launch("sft", "supervised.yaml", "sft.epochs=2", "observe.live=false")
        assert supervised.wait() == 0, supervised.output
        (export,) = folder.glob("runs/mine-supervised-*/export")
        started = [f"{takes}={export}"]
    run = launch("train", "run.yaml", "schedule.total_steps=3", *SMALL, *started)
    assert run.wait(600) == 0, run.output
    assert "step 3/3" in run.output, run.output
    (run_dir,) = (path for path in folder.glob("runs/mine-2*"))
    assert (run_dir / "export").is_dir()
