"""Which values are secret: the one list, for everything that shows a configuration or sends it away.

A value is secret by the name of its key, such as `hf_token` or `X-Api-Key`, or by its form, such as `Bearer ...` or the
password in a URL. A reference to the environment, such as `${oc.env:HF_TOKEN}`, is not: it says where the secret is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
# Names, as words in lower case with spaces between, that end in one of these.
_SECRET = re.compile(
    r"(?:^| )(?:"
    r"api ?key|auth|authorization|bearer|cookies?|credentials?|dsn|jwt|pass ?phrase|passwd|passwords?|pat|pwd|secrets?"
    r"|(?:access|account|admin|auth|aws|azure|client|deploy|encryption|license|master|private|secret|service|shared"
    r"|signing|ssh|storage|subscription) keys?|api keys"
    r"|(?:access|api|auth|bearer|id|oauth|refresh|session) tokens"
    r"|token)$"
)
# A token of text, not of access.
_TEXT_TOKEN = re.compile(
    r"(?:^| )(?:assistant|audio|begin|bos|cls|end|eod|eom|eos|eot|fim|first|generated|image|last|mask|next|pad|per"
    r"|prompt|sep|special|start|stop|system|think|tool|turn|unk|user|video) token$"
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Without a default, which may be the secret itself.
_REFERENCE = re.compile(r"\$\{[^{},]*\}")
_IN_TEXT = (
    # Credentials, and parameters with secret names, of a URL.
    re.compile(r"(?<=://)[^/@\s]+(?=@)"),
    re.compile(r"(?<=[?&])(?P<name>[\w.-]+)=(?P<value>[^&#\s\"']+)"),
    re.compile(r"(?i)(?<=\bbearer )\s*[^\s\"']+|(?<=\bbasic )\s*[a-z0-9+/=]{8,}"),
    # Keys that their issuers have made recognizable.
    re.compile(r"\b(?:hf_|sk-|gh[opsu]_|github_pat_|glpat-|xox[abp]-|AKIA|AIza)[\w-]{8,}"),
)


def is_secret(name: str) -> bool:
    """Whether the value of an option, header or variable of this name is secret."""
    words = " ".join(word.lower() for word in _WORD.findall(name))
    return _SECRET.search(words) is not None and _TEXT_TOKEN.search(words) is None


def masked(value: Any, key: str = "") -> Any:
    """A configured value as anyone may see it, with all that it holds; `key` is its name, or its dotted key."""
    if any(map(is_secret, key.split("."))) and value not in (None, "", {}, []) and not isinstance(value, bool):
        return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else HIDDEN
    if isinstance(value, Mapping):
        return {name: masked(entry, str(name)) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [masked(entry) for entry in value]
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """A text without what is secret by its form."""
    for pattern in _IN_TEXT:
        text = pattern.sub(_masked_match, text)
    return text


def _masked_match(match: re.Match[str]) -> str:
    if _REFERENCE.search(match[0]):
        return match[0]
    named = match.groupdict()
    if not named:
        return HIDDEN
    return f"{named['name']}={HIDDEN}" if is_secret(named["name"]) else match[0]
