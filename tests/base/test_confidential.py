"""What names and forms say of a value."""

from __future__ import annotations

import pytest

from megasync.base.confidential import HIDDEN, is_secret, masked, masked_text
from megasync.config.load import schema_keys

SECRETS = """token hf_token HF_TOKEN access_token apiKey api-key X-Api-Key OPENAI_API_KEY AWS_SECRET_ACCESS_KEY
password db_password passwd client_secret Authorization Proxy-Authorization Cookie private_key
use_auth_token credentials authToken wandb_api_key refresh_tokens api_keys DB_PASS_PHRASE
sessionToken --api-key APIKEY azure_key githubToken"""
OTHERS = """max_tokens max_new_tokens pad_token eos_token stop_token tokens tokenizer key keys answer_key
group_key sort_key token_budget author authors author_name stop_token_ids password_length n_tokens
image_token monkey secretary keyboard top_k prompt_tokens context_length prompt generation_key
token_type_ids"""


@pytest.mark.parametrize("name", SECRETS.split())
def test_a_name_tells_a_secret(name: str) -> None:
    assert is_secret(name) and masked("x", name) == HIDDEN and masked({name: {"deep": ["x"]}}) == {name: HIDDEN}
    assert masked("${oc.env:NAME}", name) == "${oc.env:NAME}" and masked("${oc.env:NAME,x}", name) == HIDDEN
    assert masked(None, name) is None and masked(True, name) is True


@pytest.mark.parametrize("name", OTHERS.split())
def test_other_names_do_not(name: str) -> None:
    assert not is_secret(name) and masked("x", name) == "x"


def test_no_key_of_the_schema_is_taken_for_a_secret() -> None:
    assert [key for key, _ in schema_keys() if is_secret(key.rpartition(".")[2])] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgres://u:p@h/db?sslmode=on&token=abc&x=1", "postgres://(hidden)@h/db?sslmode=on&token=(hidden)&x=1"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer (hidden)"),
        ("Basic dXNlcjpwYXNz", "Basic (hidden)"),
        ("--key sk-abcdefghij --top 3", "--key (hidden) --top 3"),
        ("https://${oc.env:USER}@host", "https://${oc.env:USER}@host"),
        ("What is 3 @ 4? A basic sum; see http://host/a?b=c", "What is 3 @ 4? A basic sum; see http://host/a?b=c"),
    ],
)
def test_a_form_tells_a_secret(text: str, shown: str) -> None:
    assert masked_text(text) == shown == masked(masked([text]))[0]
