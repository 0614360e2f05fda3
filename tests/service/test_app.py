"""What `megasync serve` makes of a configuration, of keys and of outcomes, without ranks and servers."""

import asyncio
import re
import stat

import numpy as np
import pytest
from service_fakes import SERVED as MODEL
from service_fakes import FakeServers, FakeTrainer
from sound_config import make, model

from megasync.base import missing
from megasync.concurrency.tasks import cancel_and_wait
from megasync.config import SERVICE_FOLDER, TENANTS_FILE
from megasync.errors import ConfigError, DataError, ServerError
from megasync.observe.observer import RunParts
from megasync.observe.state_file import ModelState, TenantState, read_state
from megasync.service import app, tenant_logs
from megasync.service.interfaces import Sampling
from megasync.service.promises import Promise
from megasync.service.requests import Failed, OptimStep, Sample, ServiceClosed, Updated
from megasync.service.service import Service
from megasync.service.status import ModelStatus, TenantStatus
from megasync.serving.server import served_adapters
from megasync.tenants.checks import read_tenants, served_config

__all__ = ["make", "model"]

SERVED = ("serve={port: 0}", "trainer.lora.rank=8", "cluster.device=cpu", "model.dtype=float32")


def test_ranks_and_servers_get_no_data_and_no_algorithm_and_the_whole_context(make):
    config = make(*SERVED, "algorithm.kl_coef=0.1", "eval.every_steps=3", "rollout.workers=2", "critic.enabled=true")
    served = served_config(config, 512)
    assert served.data.train is None and served.data.eval is None and served.eval.every_steps != 3
    assert (served.algorithm.kl_coef, served.critic.enabled, served.rollout.workers) == (0.0, False, 0)
    assert (served.sync.transport, served.rollout.context_length) == ("adapters", 512)
    assert served.data.prompt.max_tokens + served.rollout.sampling.max_new_tokens == 512
    assert config.algorithm.kl_coef == 0.1, "the saved configuration keeps what was written"


def test_servers_know_all_projections_and_find_adapters_by_name_in_the_run_directory(make, tmp_path):
    adapters = served_adapters(served_config(make(*SERVED), 512), tmp_path)
    assert adapters is not None and adapters.rank == 8 and adapters.root == tmp_path / SERVICE_FOLDER / "served"
    assert {"q_proj", "down_proj", "lm_head"} <= {*adapters.targets}


def test_limits_are_those_of_the_configuration(make):
    config = make(*SERVED, "serve.disk_gb=0.5", "serve.promises=7", "serve.request_mb=2", "serve.models=3")
    limits = app.limits_of(config.serve)
    assert (limits.disk, limits.pending, limits.kept, limits.request) == (500_000_000, 7, 14, 2 * 2**20)
    assert (limits.models, limits.heartbeat_seconds) == (3, 600.0)


def test_a_key_is_drawn_once_for_this_user_alone_and_a_file_of_ones_own_is_left_alone(make, tmp_path):
    run = app.ServedRun(make(*SERVED), tmp_path)
    file = run.keys_file()
    assert file == tmp_path / TENANTS_FILE and stat.S_IMODE(file.stat().st_mode) == 0o600
    before = read_tenants(file)
    assert list(before) == ["local"] and read_tenants(run.keys_file()) == before
    (own := tmp_path / "own").write_text("lab tml-0123456789abcdef")
    assert app.ServedRun(make(*SERVED, f"serve.keys={own}"), tmp_path / "other").keys_file() == own
    assert not (tmp_path / "other").exists()


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(missing, "find_spec", lambda package: package)


def test_nothing_starts_where_the_machine_or_the_model_cannot(make, model, monkeypatch, installed):
    monkeypatch.setattr(app, "new_run_dir", lambda config: pytest.fail("a run directory was made"))
    (model / "tokenizer.json").write_text("no tokenizer")
    for start in (lambda: app.serve_forever(make(*SERVED)), lambda: app.LocalService(make(*SERVED))):
        with pytest.raises(DataError, match="tokenizer"):
            start()


def test_each_tenant_has_a_log_of_its_outcomes_and_none_of_another(tmp_path):
    def promise(tenant, name, kind, outcome):
        made = Promise(name, tenant, "m", 1, None, kind.__name__, b"", 12, 0.0)
        made.outcome = outcome
        return made

    with tenant_logs.writing(tmp_path):
        tenant_logs.note(promise("lab", "m:1", OptimStep, Updated({})), 0.25)
        tenant_logs.note(promise("lab", "s:1", Sample, None), 0.25)
        tenant_logs.note(promise("lab", "s:2", Sample, Failed("prompt too long", "user")), 0.5)
        tenant_logs.note(promise("other", "n:1", OptimStep, Updated({})), 1.0)
    tenant_logs.note(promise("lab", "m:9", OptimStep, Updated({})), 0.25)
    lines = (tmp_path / "tenant-lab.log").read_text().splitlines()
    assert [line.partition(": ")[2] for line in lines] == [
        "OptimStep m:1, 12 tokens, 0.25 s: done",
        "Sample s:2, 12 tokens, 0.50 s: failed (user): prompt too long",
    ]
    assert "n:1" in (tmp_path / "tenant-other.log").read_text()


def test_a_log_of_a_tenant_has_a_bounded_size(tmp_path, monkeypatch):
    monkeypatch.setattr(tenant_logs, "BYTES", 1_000)
    with tenant_logs.writing(tmp_path):
        for seq in range(100):
            tenant_logs.note(Promise(f"m:{seq}", "lab", "m", seq, None, "OptimStep", b"", 1, 0.0), 0.1)
    assert {path.name for path in tmp_path.iterdir()} <= {"tenant-lab.log", "tenant-lab.log.1"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 3_000
    # The last lines are there.
    kept = "".join(path.read_text() for path in (*tmp_path.glob("*.1"), *tmp_path.glob("*.log")))
    assert [f"m:{seq}," in kept for seq in range(95, 100)] == [True] * 5


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path):
    with tenant_logs.writing(tmp_path / "absent"):
        tenant_logs.note(Promise("m:1", "lab", "m", 1, None, "OptimStep", b"", 1, 0.0), 0.1)


def test_the_state_of_a_tenant_has_its_living_models_newest_first_and_all_of_its_steps():
    models = [ModelStatus(name, 8, steps, 0.5, 2, 1.25, True) for name, steps in (("c", 0), ("a", 3))]
    state = app.tenant_state("lab", TenantStatus(1, models, 7, 300, 51.26, 5, 900, 7, 2, 3, 10**6))
    assert state == TenantState(
        name="lab",
        sessions=1,
        models=[
            ModelState(name=name, rank=8, steps=steps, loss=0.5, waiting=2, waited=1.2)
            for name, steps in (("c", 0), ("a", 3))
        ],
        steps=7,
        tokens=300,
        rate=51.3,
        promises=5,
        tokens_in_flight=900,
        samplers=2,
        checkpoints=3,
        disk_bytes=10**6,
    )
    assert state.waited == 1.2


class FewServers:
    """A fleet that never changes, or that has lost too many servers."""

    def __init__(self) -> None:
        self.lost = ""

    async def watch(self) -> None:
        if self.lost:
            raise ServerError(self.lost)

    def joiners(self) -> list:
        return []


@pytest.fixture
async def started(make, tmp_path, monkeypatch):
    """Starts a service over fakes; gives it, its run, its fleet, its servers, and the task that ends with it."""
    servers, fleet, tasks = FakeServers(), FewServers(), []
    monkeypatch.setattr(app, "WATCH_SECONDS", 0.01)

    async def start(self, stack, opened):
        folder = self.run_dir / SERVICE_FOLDER
        stack.enter_context(tenant_logs.writing(self.run_dir / "logs"))
        service = await stack.enter_async_context(Service(folder, FakeTrainer(), servers, MODEL))
        opened.observer.show(RunParts(tenants=lambda: app.tenant_states(service)))
        return service, fleet

    monkeypatch.setattr(app.ServedRun, "_start", start)

    async def begin(endpoint=None):
        run = app.ServedRun(make(*SERVED, "observe.live=false"), tmp_path / "run", endpoint)
        (tmp_path / "run").mkdir(exist_ok=True)
        up: asyncio.Future = asyncio.get_running_loop().create_future()
        tasks.append(asyncio.create_task(run.execute(up.set_result)))
        await asyncio.wait([up, tasks[-1]], return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await tasks[-1]
        return run, await up, tasks[-1]

    yield begin, fleet, servers
    await cancel_and_wait(*tasks)


async def test_a_stop_answers_what_was_accepted_and_a_resumed_service_has_it(started, tmp_path, capsys):
    pytest.importorskip("tinker")
    from megasync.service.endpoint import Endpoint

    begin, _, servers = started
    run, service, task = await begin(Endpoint)
    session = await service.create_session("local")
    base = await service.create_sampler("local", session, 0, base_model=MODEL.name)
    servers.pause = asyncio.Event()
    promise = await service.submit("local", Sample(Sampling(np.arange(3)), base, 0))
    assert run.request_stop("SIGINT")
    await asyncio.sleep(0)
    servers.pause.set()
    await task
    out, key = capsys.readouterr().out, (tmp_path / "run" / TENANTS_FILE).read_text().split()[1]
    assert "stopping: SIGINT" in out and "megasync resume" in out
    url = re.findall(r"TINKER_BASE_URL=(\S+)", out)[-1]
    assert url.startswith("http://127.0.0.1:") and key not in out
    state = read_state(tmp_path / "run")
    assert state is not None and (state.status, state.reason) == ("stopped", "SIGINT")
    assert [tenant.name for tenant in state.tenants] == ["local"] and state.tenants[0].promises == 0
    run, service, task = await begin(Endpoint)
    assert not isinstance(await service.outcome("local", promise, 0), Failed | None)
    run.request_stop("again")
    await task


async def test_too_few_servers_end_a_service_with_the_reason(started, tmp_path):
    begin, fleet, _ = started
    _, service, task = await begin()
    fleet.lost = "0 servers are left"
    with pytest.raises(ServerError, match="0 servers are left"):
        await task
    state = read_state(tmp_path / "run")
    assert state is not None and state.status == "failed" and "0 servers are left" in state.reason
    with pytest.raises(ServiceClosed):
        await service.create_session("local")


async def test_the_service_of_a_program_has_no_port_and_ends_with_its_block(
    started, make, monkeypatch, installed, capsys
):
    monkeypatch.setattr(app, "_check", lambda config: None)
    local = app.LocalService(make(*SERVED, "observe.live=false"))
    async with local as service:
        await service.create_session("me")
    assert local.run_dir is not None and not (local.run_dir / TENANTS_FILE).exists()
    assert "TINKER_BASE_URL" not in capsys.readouterr().out
    state = read_state(local.run_dir)
    assert state is not None and [tenant.name for tenant in state.tenants] == ["me"]
    async with app.LocalService(local.config, run_dir=local.run_dir) as service:
        assert len(service.sessions("me")) == 1
    # Its adapters are for this model.
    with pytest.raises(ConfigError, match="model.dtype=float16 cannot replace"):
        app.LocalService(make(*SERVED, "model.dtype=float16"), run_dir=local.run_dir)


def test_a_file_names_the_service_to_continue(make, monkeypatch, tmp_path):
    pytest.importorskip("tinker")
    begun: list = []

    async def stoppable(execute, run_dir, config, run):
        execute.close()
        begun.append(run_dir)
        (run_dir / SERVICE_FOLDER).mkdir(exist_ok=True)

    monkeypatch.setattr(app, "run_stoppable", stoppable)
    monkeypatch.setattr(app, "_check", lambda config: None)
    config, file = make(*SERVED), tmp_path / "this.run"
    for _ in range(2):
        app.serve_forever(config, file)
    app.serve_forever(config)
    first, again, other = begun
    assert first == again != other and file.read_text().strip() == str(first.absolute())
    with pytest.raises(ConfigError, match="model.dtype=float16 cannot replace"):
        app.serve_forever(make(*SERVED, "model.dtype=float16"), file)
