"""Tinker's real client, unchanged, against the endpoint and a service whose trainer and servers are fakes."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import inspect
import json
import re
import threading
import urllib.request
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from service_fakes import SERVED

tinker = pytest.importorskip("tinker")
pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

from endpoint_rig import KEYS, serving  # noqa: E402
from tinker import types  # noqa: E402
from tiny_models import byte_tokenizer  # noqa: E402

from megasync.errors import DataError  # noqa: E402
from megasync.service import methods  # noqa: E402
from megasync.service.limits import Limits  # noqa: E402

CLASSES = {name: getattr(tinker, name) for name in methods.METHODS}
SECONDS = 60.0
PARAMS = types.SamplingParams(max_tokens=4)


def prompt(*ids: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(ids or (1, 2, 3)))


def data(count: int = 2) -> list[types.Datum]:
    inputs = {"target_tokens": np.array([2, 3, 4]), "weights": np.ones(3, np.float32)}
    return [types.Datum(model_input=prompt(1, 2, 3 + i % 50), loss_fn_inputs=inputs) for i in range(count)]


def resolved(value: Any) -> Any:
    """The result of whatever a method returns: a coroutine, a future, a coroutine of one, or the result itself."""
    while True:
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        elif isinstance(value, tinker.APIFuture | tinker.BackcompatSamplingClientFuture) or hasattr(value, "result"):
            value = value.result(timeout=SECONDS)
        else:
            return value


class Client:
    """The clients of a tenant. A method is called by name, also with `_async`."""

    def __init__(self, url: str, tenant: str = "ann", base_model: str = SERVED.name) -> None:
        self.base_model = base_model
        self.service = tinker.ServiceClient(base_url=url, api_key=KEYS[tenant], user_metadata={"who": tenant})
        self.rest = tinker.RestClient(base_url=url, api_key=KEYS[tenant])

    def training(self) -> Any:
        return resolved(self.service.create_lora_training_client(self.base_model, rank=4, seed=1))

    def sampling(self) -> Any:
        return resolved(self.service.create_sampling_client(base_model=self.base_model))

    def checkpoint(self, sampler: bool = False) -> str:
        training = self.training()
        return resolved(training.save_weights_for_sampler("s") if sampler else training.save_state("w")).path


def custom(data: Any, logprobs: Any) -> Any:
    return sum(each.sum() for each in logprobs) * 2, {"mine": 3.0}


# How each method is called: a client, the suffix ("" or "_async") and what follows from it.


def service(name: str, *args: Any, **kwargs: Any) -> Any:
    return lambda client, suffix: getattr(client.service, name + suffix)(*args, **kwargs)


def training(name: str, *args: Any, **kwargs: Any) -> Any:
    return lambda client, suffix: getattr(client.training(), name + suffix)(*args, **kwargs)


def sampling(name: str, *args: Any, **kwargs: Any) -> Any:
    return lambda client, suffix: getattr(client.sampling(), name + suffix)(*args, **kwargs)


def rest(name: str, *args: Any, **kwargs: Any) -> Any:
    return lambda client, suffix: getattr(client.rest, name + suffix)(*args, **kwargs)


def of_checkpoint(name: str, *args: Any, sampler: bool = False) -> Any:
    return lambda client, suffix: getattr(client.rest, name + suffix)(client.checkpoint(sampler), *args)


def of_model(name: str) -> Any:
    return lambda client, suffix: getattr(client.rest, name + suffix)(client.training().model_id)


def by_path(name: str) -> Any:
    return lambda client, suffix: getattr(client.service, name + suffix)(client.checkpoint())


def load(name: str) -> Any:
    return lambda client, suffix: getattr(client.training(), name + suffix)(client.checkpoint())


def delete(client: Client, suffix: str) -> Any:
    path = types.ParsedCheckpointTinkerPath.from_tinker_path(client.checkpoint())
    return getattr(client.rest, "delete_checkpoint" + suffix)(path.training_run_id, path.checkpoint_id)


def close(client: Client, suffix: str) -> Any:
    other = tinker.ServiceClient(base_url=client.service._base_url, api_key=KEYS["ann"])
    other.holder  # noqa: B018 - begins the session
    return other.close("success", "done")


def of_session(name: str, *args: Any) -> Any:
    return lambda client, suffix: getattr(client.rest, name + suffix)(client.service.holder.get_session_id(), *args)


CALLS: dict[str, dict[str, Any]] = {
    "ServiceClient": {
        "close": close,
        "copy_weights": lambda client, suffix: client.rest.copy_weights("tinker://m/weights/w", "project"),
        "create_custom_loss": service("create_custom_loss", lambda logprobs: ((-logprobs).sum(), {}), {"logprobs": 1}),
        "create_lora_training_client": lambda client, suffix: getattr(
            client.service, "create_lora_training_client" + suffix
        )(client.base_model, 4),
        "create_rest_client": service("create_rest_client"),
        "create_sampling_client": by_path("create_sampling_client"),
        "create_training_client_from_state": by_path("create_training_client_from_state"),
        "create_training_client_from_state_with_optimizer": by_path("create_training_client_from_state_with_optimizer"),
        "get_console_url": service("get_console_url"),
        "get_server_capabilities": service("get_server_capabilities"),
        "get_telemetry": service("get_telemetry"),
        "holder": lambda client, suffix: client.service.holder and None,
    },
    "TrainingClient": {
        "create_sampling_client": lambda client, suffix: getattr(client.training(), "create_sampling_client" + suffix)(
            client.checkpoint(sampler=True)
        ),
        "forward": training("forward", data(), "cross_entropy"),
        "forward_backward": training("forward_backward", data(3), "ppo", {"clip_low_threshold": 0.5}),
        "forward_backward_custom": training("forward_backward_custom", data(), custom),
        "get_console_url": training("get_console_url"),
        "get_info": training("get_info"),
        "get_telemetry": training("get_telemetry"),
        "get_tokenizer": training("get_tokenizer"),
        "load_state": load("load_state"),
        "load_state_with_optimizer": load("load_state_with_optimizer"),
        "optim_step": training("optim_step", types.AdamParams(learning_rate=2.0)),
        "save_state": training("save_state", "w", 3600, True, {"a": "b"}),
        "save_weights_and_get_sampling_client": training("save_weights_and_get_sampling_client", kind="inflight"),
        "save_weights_external": training("save_weights_external", "e"),
        "save_weights_for_sampler": training("save_weights_for_sampler", "s", 3600),
    },
    "SamplingClient": {
        "compute_logprobs": sampling("compute_logprobs", prompt()),
        "create": lambda client, suffix: tinker.SamplingClient.create(
            client.service.holder, base_model=client.base_model
        ),
        "from_sampler_handle": lambda client, suffix: tinker.SamplingClient.from_sampler_handle(
            client.sampling().get_sampler_handle(), api_key=KEYS["ann"]
        ),
        "get_base_model": sampling("get_base_model"),
        "get_sampler_handle": sampling("get_sampler_handle"),
        "get_telemetry": sampling("get_telemetry"),
        "get_tokenizer": sampling("get_tokenizer"),
        "on_queue_state_change": lambda client, suffix: None,
        "sample": sampling("sample", prompt(), 2, PARAMS),
    },
    "RestClient": {
        "assign_session_project": of_session("assign_session_project", "project"),
        "copy_weights": rest("copy_weights", "tinker://m/weights/w", "project"),
        "delete_checkpoint": delete,
        "delete_checkpoint_from_tinker_path": of_checkpoint("delete_checkpoint_from_tinker_path"),
        "export_session_trace": of_session("export_session_trace"),
        "get_audit_log": rest("get_audit_log"),
        "get_billing_usage": rest("get_billing_usage", "2026-01-01", "2026-01-02"),
        "get_current_checkpoint_storage_usage": rest("get_current_checkpoint_storage_usage"),
        "get_external_weights_urls": lambda client, suffix: getattr(client.rest, "get_external_weights_urls" + suffix)(
            resolved(client.training().save_weights_external("e")).path
        ),
        "get_sampler": lambda client, suffix: getattr(client.rest, "get_sampler" + suffix)(
            client.sampling()._sampling_session_id
        ),
        "get_server_capabilities": rest("get_server_capabilities"),
        "get_session": of_session("get_session"),
        "get_telemetry": rest("get_telemetry"),
        "get_training_run": of_model("get_training_run"),
        "get_training_run_by_tinker_path": of_checkpoint("get_training_run_by_tinker_path"),
        "get_weights_info_by_tinker_path": of_checkpoint("get_weights_info_by_tinker_path"),
        "list_checkpoints": of_model("list_checkpoints"),
        "list_sessions": rest("list_sessions"),
        "list_training_runs": rest("list_training_runs", 5, 1),
        "list_user_checkpoints": rest("list_user_checkpoints"),
        "publish_checkpoint_from_tinker_path": of_checkpoint("publish_checkpoint_from_tinker_path"),
        "search_sessions": rest("search_sessions", types.SessionSearchRequest()),
        "set_checkpoint_ttl_from_tinker_path": of_checkpoint("set_checkpoint_ttl_from_tinker_path", 7200),
        "unpublish_checkpoint_from_tinker_path": of_checkpoint("unpublish_checkpoint_from_tinker_path"),
        "whoami": rest("whoami"),
    },
}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def base_of(name: str) -> str:
    return name.removesuffix("_async")


def test_the_page_has_all_methods_of_the_client_in_its_version():
    """A new version of the client may have new methods: `methods` must say what becomes of them."""
    assert version("tinker") == methods.VERSION
    named = {name: set(table) for name, table in methods.METHODS.items()}
    assert named == {name: {base_of(each) for each in public(kind)} for name, kind in CLASSES.items()}
    assert named == {name: set(calls) for name, calls in CALLS.items()}


async def test_every_method_works_or_is_refused_with_its_reason(tmp_path):
    folder = tmp_path / "model"
    byte_tokenizer().save_pretrained(folder)
    served = dataclasses.replace(SERVED, name=str(folder))

    wrong: dict[str, str] = {}

    def call_all(url: str) -> None:
        client = Client(url, base_model=served.name)
        for name, calls in CALLS.items():
            for method, call in calls.items():
                for suffix in ("", "_async"):
                    if not hasattr(CLASSES[name], method + suffix):
                        continue
                    if why := difference(methods.reason(name, method), client, call, suffix):
                        wrong[f"{name}.{method}{suffix}"] = why
        resolved(client.service.close("success"))

    def difference(expected: str, client: Client, call: Any, suffix: str) -> str:
        """What is not as expected; empty if all is."""
        try:
            resolved(call(client, suffix))
        except tinker.NotFoundError as error:
            return "" if expected and expected in str(error) else str(error)
        except Exception as error:  # noqa: BLE001 - the test reports it
            return "" if expected == methods.NO_TOKEN and "requires JWT" in str(error) else repr(error)
        return f"works, not refused: {expected}" if expected else ""

    async with serving(tmp_path / "run", served, Limits(models=1000)) as rig:
        await asyncio.to_thread(call_all, rig.endpoint.url)
    assert wrong == {}


@pytest.fixture
async def rig(tmp_path):
    async with serving(tmp_path) as rig:
        yield rig


async def run(rig, scenario):
    """What a scenario with a client of its own returns. It runs in a thread, because it blocks."""

    def play() -> Any:
        client = Client(rig.endpoint.url)
        try:
            return scenario(client)
        finally:
            resolved(client.service.close("success"))

    return await asyncio.to_thread(play)


async def test_requests_that_are_sent_without_waiting_take_effect_in_order(rig):
    def scenario(client):
        training = client.training()
        calls = [training.forward_backward(data(3), "cross_entropy"), training.optim_step(types.AdamParams())]
        calls += [training.forward_backward(data(1), "ppo"), training.forward_backward(data(2), "ppo")]
        calls += [training.optim_step(types.AdamParams()), training.save_state("w")]
        results = [resolved(call) for call in calls]
        again = resolved(client.service.create_training_client_from_state_with_optimizer(results[-1].path))
        forward = [resolved(each.forward(data(1), "ppo")) for each in (training, again)]
        return [len(each.loss_fn_outputs) for each in (results[0], results[2], results[3])], forward

    counts, (left, right) = await run(rig, scenario)
    assert counts == [3, 1, 2]
    assert left.metrics == right.metrics
    order = [call[0] for call in rig.trainer.calls if call[0] in ("compute", "update")]
    # Neighbouring passes may be computed in one call.
    assert re.sub("(compute ?)+", "compute ", " ".join(order)).strip() == "compute update compute update compute"


async def test_a_large_batch_arrives_in_chunks_as_one(tmp_path):
    async with serving(tmp_path, limits=Limits(tokens=10**7)) as rig:

        def scenario(client):
            return resolved(client.training().forward_backward(data(2500), "cross_entropy"))

        assert len((await run(rig, scenario)).loss_fn_outputs) == 2500


async def test_a_request_that_fails_raises_with_its_category(rig):
    def refuse(call: str) -> None:
        if call == "update":
            raise DataError("this step cannot be taken")

    rig.trainer.before = refuse

    def scenario(client):
        training = client.training()
        with pytest.raises(tinker.RequestFailedError, match="this step cannot be taken") as error:
            resolved(training.optim_step(types.AdamParams()))
        assert error.value.category == types.RequestErrorCategory.User

    await run(rig, scenario)


async def test_an_abandoned_sample_stops(rig):
    rig.servers.pause = asyncio.Event()
    loop, waiting = asyncio.get_running_loop(), threading.Event()
    completions = rig.service.completions

    async def noted(*arguments):
        waiting.set()
        return await completions(*arguments)

    rig.service.completions = noted

    def scenario(client):
        future = client.sampling().sample(prompt(), 1, PARAMS)
        # By then it knows the name of what it cancels.
        assert waiting.wait(SECONDS)
        asyncio.run_coroutine_threadsafe(rig.servers.until(1), loop).result(timeout=SECONDS)
        future.future().cancel()
        asyncio.run_coroutine_threadsafe(rig.servers.until(0), loop).result(timeout=SECONDS)

    await run(rig, scenario)


async def test_a_client_that_waits_gets_its_outcomes_from_the_next_service(tmp_path):
    begun = asyncio.Event()

    def scenario(url: str, loop: asyncio.AbstractEventLoop) -> Any:
        client = Client(url)
        training, sampler = client.training(), client.sampling()
        calls = [training.forward_backward(data(), "cross_entropy"), training.optim_step(types.AdamParams())]
        resolved(calls[1])
        sample = sampler.sample(prompt(), 3, PARAMS)
        loop.call_soon_threadsafe(begun.set)
        sampled = resolved(sample)
        calls.append(training.forward_backward(data(), "cross_entropy"))
        computed = [resolved(call) for call in (calls[0], calls[2])]
        resolved(client.service.close("success"))
        return sampled, computed

    async with serving(tmp_path) as first:
        first.servers.pause = asyncio.Event()
        playing = asyncio.create_task(asyncio.to_thread(scenario, first.endpoint.url, asyncio.get_running_loop()))
        await begun.wait()
        await first.servers.until(1)
        port = int(first.endpoint.url.rpartition(":")[2])
    async with serving(tmp_path, port=port):
        sampled, computed = await playing
    assert len(sampled.sequences) == 3 and [len(each.loss_fn_outputs) for each in computed] == [2, 2]


async def test_files_of_a_checkpoint_are_downloaded_without_a_key(rig):
    def scenario(client):
        path = resolved(client.training().save_weights_external("final", ttl_seconds=3600)).path
        listed = resolved(client.rest.list_user_checkpoints()).checkpoints
        found = resolved(client.rest.get_external_weights_urls(path))
        files = {name: urllib.request.urlopen(url, timeout=SECONDS).read() for name, url in found.urls.items()}
        with pytest.raises(tinker.BadRequestError, match="files are not encrypted"):
            resolved(client.training().save_weights_external("secret", age_encryption_recipients=["age1x"]))
        return path, listed, files, found.urls

    path, listed, files, urls = await run(rig, scenario)
    assert path.endswith("/external_weights/final")
    assert [(each.tinker_path, each.checkpoint_type) for each in listed] == [(path, "external")]
    assert json.loads(files["state.json"]).keys() == {"w"}
    # A changed address, as one of another file or of a later time, is none.
    token = urls["state.json"].rpartition("/")[2]
    text, _, signature = token.partition(".")
    said = json.loads(base64.urlsafe_b64decode(text))
    for index, value in ((0, "bob"), (2, "../../service.db"), (3, said[3] + 1)):
        changed = base64.urlsafe_b64encode(json.dumps([*said[:index], value, *said[index + 1 :]]).encode()).decode()
        assert (await rig.ask(f"files/{changed}.{signature}", key=None))[0] == 403
    for wrong in ("x", f"{text}.", f"{text}.{signature}0", "\u00e9.x", "%ff.%ff", "NQ==.x", "."):
        assert (await rig.ask(f"files/{wrong}", key=None))[0] == 403
    rig.endpoint._secret = bytes(32)
    assert (await rig.ask(f"files/{token}", key=None))[0] == 403


async def test_an_address_of_a_file_ends(rig, monkeypatch):
    monkeypatch.setattr("megasync.service.endpoint._FILE_SECONDS", -1)

    def scenario(client):
        path = resolved(client.training().save_weights_external("final")).path
        return resolved(client.rest.get_external_weights_urls(path)).urls["state.json"]

    url = await run(rig, scenario)
    assert (await rig.ask(url.partition("/api/v1/")[2], key=None))[0] == 403
