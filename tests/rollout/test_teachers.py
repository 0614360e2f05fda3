"""Teachers: what their servers are asked, which rows they teach, and what becomes of groups. No server."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import byte_tokenizer, make_tiny_model

from megasync.config import Config
from megasync.config.schema import TeacherConfig
from megasync.errors import ConfigError, DataError, HttpStatusError
from megasync.rollout.teachers import Teacher, Teachers, load_teachers
from megasync.trajectory import TEACHER, Trajectory

TOKENIZER = byte_tokenizer()


class FakeServer:
    """Scores token n with -n, and keeps the requests."""

    def __init__(self, url="http://a", error=None):
        self.url, self.error, self.bodies = url, error, []

    async def post(self, path, body, timeout):
        assert path == "/generate"
        self.bodies.append(body)
        if self.error is not None:
            raise self.error
        first, *rest = body["input_ids"][body["logprob_start_len"] :]
        return {"meta_info": {"input_token_logprobs": [[None, first, None], *([-float(n), n, None] for n in rest)]}}


def teacher_of(server, context_length=100):
    teacher = Teacher("t", 8, 5.0, context_length)
    teacher.add_server(server)
    return teacher


def response(*ids, prompt=(7, 8)):
    return Trajectory(prompt, ids, [1] * len(ids), [-0.5] * len(ids), [0] * len(ids))


async def test_the_log_probs_are_those_of_the_response_alone():
    server = FakeServer()
    found = await teacher_of(server).logprobs([7, 8], [3, 4, 5])
    assert found.dtype == np.float32 and found.tolist() == [-3.0, -4.0, -5.0]
    (body,) = server.bodies
    assert (body["input_ids"], body["logprob_start_len"]) == ([7, 8, 3, 4, 5], 1)
    assert body["sampling_params"] == {"temperature": 1.0, "max_new_tokens": 1}


async def test_a_response_beyond_the_context_has_none():
    server = FakeServer()
    teacher = teacher_of(server, context_length=5)
    assert await teacher.logprobs([7, 8], [3, 4, 5]) is None
    assert server.bodies == [] and teacher.metrics()["too_long"] == 1.0
    (kept,) = await Teachers({"t": teacher}, {"t": []}).teach([response(3, 4, 5)], {})
    assert kept.arrays == {}


async def test_a_row_goes_to_the_teacher_of_its_source_or_to_that_of_all_others():
    servers = {name: FakeServer(f"http://{name}") for name in ("maths", "rest")}
    by_name = {name: teacher_of(server) for name, server in servers.items()}
    teachers = Teachers(by_name, {"maths": ["gsm8k", "aime"], "rest": []})
    for source in ("aime", "code", None):
        columns = {} if source is None else {"data_source": source}
        (taught,) = await teachers.teach([response(3)], columns)
        assert taught.arrays[TEACHER].tolist() == [-3.0]
    assert [len(server.bodies) for server in servers.values()] == [1, 2]
    (untaught,) = await Teachers(by_name, {"maths": ["aime"]}).teach([response(3)], {"data_source": "code"})
    assert untaught.arrays == {}


async def test_groups_are_committed_with_the_log_probs(make_bench):
    server = FakeServer()
    bench = make_bench(total=4, teachers=Teachers({"t": teacher_of(server)}, {"t": []}))
    await bench.rollouter.run()
    for group in bench.buffer.committed.values():
        assert all(t.arrays[TEACHER].tolist() == [-5.0, -5.0] for t in group.trajectories)


async def test_a_refused_response_drops_its_group(make_bench):
    server = FakeServer(error=HttpStatusError("no", status=400))
    bench = make_bench(total=4, teachers=Teachers({"t": teacher_of(server)}, {"t": []}))
    with pytest.raises(DataError, match="teacher 't' refused a request"):
        await bench.rollouter.run()
    assert set(bench.buffer.dropped.values()) == {"teacher_error"}


def configured(**teachers):
    config = Config(teachers=teachers)
    config.model.path = "the policy"
    return config


def test_a_teacher_with_another_tokenizer_is_refused_with_both_folders(tmp_path):
    make_tiny_model(tmp_path / "t")
    config = configured(t=TeacherConfig(path=str(tmp_path / "t")))
    assert [*load_teachers(config, TOKENIZER).by_name] == ["t"]
    other = byte_tokenizer()
    other.add_tokens(["<another>"])
    with pytest.raises(ConfigError, match=r"teachers.t.path=.* model.path='the policy' \(they differ in '<another>'\)"):
        load_teachers(config, other)


def test_a_teachers_context_is_the_models_unless_it_is_given(tmp_path):
    make_tiny_model(tmp_path / "t")
    for given, expected in ((None, None), (12, 12)):
        config = configured(t=TeacherConfig(path=str(tmp_path / "t"), context_length=given))
        found = load_teachers(config, TOKENIZER).by_name["t"]._context_length
        assert found == expected or (expected is None and found > 12)
