"""The model of a new run: one of the small models, a folder, or a name on a hub, and what a template asks of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from megasync.errors import ConfigError
from megasync.models.hub import check_family, is_name, local_folder

# The small models that are written into a run's folder, and whether they have a chat template.
SMALL = {"digits": False, "smollm2": True}
MODELS = "models"
_KEY = "--model"


@dataclass(frozen=True, slots=True)
class Model:
    """``path`` is the value of `model.path`, ``remark`` what could not be checked here."""

    named: str
    path: str
    chats: bool
    remark: str = ""

    @property
    def small(self) -> bool:
        return self.named in SMALL


def find_model(text: str) -> Model:
    """The model that a text names. Of one on a hub, config.json is downloaded. Raises ConfigError for an unknown one.

    A name is accepted with a remark if its hub cannot be reached.
    """
    if text in SMALL:
        return Model(text, f"{MODELS}/{text}", SMALL[text])
    if is_name(text):
        try:
            check_family(local_folder(text, _KEY, weights=False), _KEY, text)
        except ConfigError as error:
            if not _is_unreachable(error):
                raise
            return Model(text, text, chats=True, remark=f"not checked here: {error}")
        return Model(text, text, chats=True)
    folder = Path(text).expanduser().absolute()
    if not (folder / "config.json").is_file():
        near = get_close_matches(text.lower(), SMALL, 1)
        raise ConfigError(
            f"{_KEY}={text!r} is neither a small model ({', '.join(SMALL)}) nor a folder with a config.json nor a name "
            f"on a hub (OWNER/NAME)" + (f"; did you mean {near[0]!r}?" if near else "; check the spelling")
        )
    check_family(folder, _KEY, text)
    return Model(text, str(folder), _has_chat_template(folder))


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    with suppress(OSError, ValueError, AttributeError):
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        return bool(settings.get("chat_template"))
    return False


def _is_unreachable(error: ConfigError) -> bool:
    """Whether a hub gave no answer at all, which says nothing about the name."""
    import httpx
    from huggingface_hub.utils import OfflineModeIsEnabled

    return any(isinstance(each, httpx.TransportError | OfflineModeIsEnabled) for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
