"""The page of the fields that `trainer.megatron` may set, docs/megatron_options.md.

`python -m megasync.planning.megatron_page` writes it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from megasync.base.files import atomic_write
from megasync.config.load import type_name
from megasync.config.megatron_options import CLASSES, FIELDS, SINCE_0_19, deciding_keys

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron_options.md"

_HEAD = """# Megatron's options

`trainer.megatron` sets fields of Megatron's own classes, for what has no key of megasync:

```yaml
trainer:
  megatron:
    model: {attention_backend: flash, moe_router_fusion: true}
    ddp: {bucket_size: 40000000}
    optimizer: {apply_wd_to_qk_layernorm: true}
```

The fields below may be set. Every other field is refused: a key of megasync decides it (one of the same name, or of the
last table), the model's config.json does, or how megasync trains and syncs; or it has not been tested. A value of
another type is refused too. What contradicts other fields is refused by Megatron when the trainer ranks start;
`megasync rehearse CONFIG` finds it without a GPU. `megasync plan` does not know what these fields do to memory. None of
them has been run on a GPU. Fields with a star need megatron-core 0.19.
"""


def page() -> str:
    """The Markdown page: the fields of each table that may be set, and the keys that decide others."""
    return "\n".join([_HEAD, *_tables()])


def _tables() -> Iterator[str]:
    for table, classes in CLASSES.items():
        yield f"## `trainer.megatron.{table}`\n\nFields of {classes}.\n\n| type | fields |\n|---|---|"
        for kind, names in FIELDS[table].items():
            fields = ", ".join(f"`{name}`{' *' * (name in SINCE_0_19)}" for name in names.split())
            yield f"| {type_name(kind)} | {fields} |"
        yield ""
    yield "## Decided by keys\n\n| key | fields |\n|---|---|"
    for key, names in deciding_keys().items():
        yield f"| `{key}` | {', '.join(f'`{name}`' for name in names)} |"
    yield ""


if __name__ == "__main__":
    atomic_write(Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE, page())
