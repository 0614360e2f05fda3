"""Which public methods of Tinker's client work against the service, and why others are refused.

`python -m megasync.service.methods` writes docs/serve_methods.md from it. A test compares the names with the client's,
and calls every method.
"""

from __future__ import annotations

from pathlib import Path

from megasync.base.files import atomic_write

# The client whose methods these are: the one in launch/serve.lock.
VERSION = "0.38.0"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "serve_methods.md"

# Routes of the client that the service refuses, as patterns of method and path, and why.
REFUSED = {
    "GET audit": "the service keeps no audit log; its log has every tenant's events",
    "GET billing/.+": "the service bills nothing; the watch page shows each tenant's tokens and disk space",
    "POST copy_weights": "a tenant has no projects; publish a checkpoint, and others load it by its path",
    "POST create_custom_loss": "a custom loss runs in the client: give the function to forward_backward_custom",
    "PUT sessions/[^/]+/project": "a tenant has no projects",
    "GET sessions/[^/]+/trace_export": "sessions are not traced",
    "POST sessions/search": "sessions are listed, not searched",
}

NO_TOKEN = "the client answers it from a token of Tinker's cloud, and a key is none"
# Every public method, without those that end in `_async` and do the same. Empty: it works. Otherwise the reason, or the
# route in `REFUSED` that has it.
METHODS: dict[str, dict[str, str]] = {
    "ServiceClient": {
        "close": "",
        "copy_weights": "POST copy_weights",
        # Unlike its route: a client that is not told to upload the loss runs it.
        "create_custom_loss": "",
        "create_lora_training_client": "",
        "create_rest_client": "",
        "create_sampling_client": "",
        "create_training_client_from_state": "",
        "create_training_client_from_state_with_optimizer": "",
        "get_console_url": "",
        "get_server_capabilities": "",
        "get_telemetry": "",
        "holder": "",
    },
    "TrainingClient": {
        "create_sampling_client": "",
        "forward": "",
        "forward_backward": "",
        "forward_backward_custom": "",
        "get_console_url": "",
        "get_info": "",
        "get_telemetry": "",
        "get_tokenizer": "",
        "load_state": "",
        "load_state_with_optimizer": "",
        "optim_step": "",
        "save_state": "",
        "save_weights_and_get_sampling_client": "",
        "save_weights_external": "",
        "save_weights_for_sampler": "",
    },
    "SamplingClient": {
        "compute_logprobs": "",
        "create": "",
        "from_sampler_handle": "",
        "get_base_model": "",
        "get_sampler_handle": "",
        "get_telemetry": "",
        "get_tokenizer": "",
        "on_queue_state_change": "",
        "sample": "",
    },
    "RestClient": {
        "assign_session_project": "PUT sessions/[^/]+/project",
        "copy_weights": "POST copy_weights",
        "delete_checkpoint": "",
        "delete_checkpoint_from_tinker_path": "",
        "export_session_trace": "GET sessions/[^/]+/trace_export",
        "get_audit_log": "GET audit",
        "get_billing_usage": "GET billing/.+",
        "get_current_checkpoint_storage_usage": "GET billing/.+",
        "get_external_weights_urls": "",
        "get_sampler": "",
        "get_server_capabilities": "",
        "get_session": "",
        "get_telemetry": "",
        "get_training_run": "",
        "get_training_run_by_tinker_path": "",
        "get_weights_info_by_tinker_path": "",
        "list_checkpoints": "",
        "list_sessions": "",
        "list_training_runs": "",
        "list_user_checkpoints": "",
        "publish_checkpoint_from_tinker_path": "",
        "search_sessions": "POST sessions/search",
        "set_checkpoint_ttl_from_tinker_path": "",
        "unpublish_checkpoint_from_tinker_path": "",
        "whoami": NO_TOKEN,
    },
}
_HEAD = f"""# Methods of Tinker's client

Every public method of the client's classes in version {VERSION}, and what `megasync serve` does with it. A method whose
name ends in `_async` does the same as the one without. Refused methods raise `tinker.NotFoundError` with the reason.
"""
_BESIDE = """## Beside the client

The answer to a sampling request says which adapters sampled each token, in the header `X-Weight-Versions` and, if
`Accept` does not name protobuf, in the JSON field `weight_versions`: for each sample a list of `[adapter, first token,
end]`, where the base model is "". The header is left out if it were longer than 4 KiB.

`GET /api/v1/training_runs/MODEL/checkpoints/KIND/NAME/archive` answers with a tar file of the checkpoint
`tinker://MODEL/KIND/NAME`:

```
curl -H "X-API-Key: $TINKER_API_KEY" -o NAME.tar \\
    $TINKER_BASE_URL/api/v1/training_runs/MODEL/checkpoints/weights/NAME/archive
```
"""


def reason(client: str, method: str) -> str:
    """Why a method is refused; empty if it works."""
    named = METHODS[client][method]
    return REFUSED.get(named, named)


def page() -> str:
    """The Markdown page: a table for each class."""
    parts = [_HEAD]
    for client, methods in METHODS.items():
        rows = [f"| `{name}` | {f'refused: {why}' if (why := reason(client, name)) else 'works'} |" for name in methods]
        parts.append("\n".join([f"## {client}", "", "| method | |", "|---|---|", *rows, ""]))
    return "\n".join([*parts, _BESIDE])


if __name__ == "__main__":
    atomic_write(PAGE, page())
