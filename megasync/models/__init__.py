"""Two small models that need no download: a random one for digit tasks, and SmolLM2-135M-Instruct from a package.

`fetch` atomically writes either one as an ordinary Hugging Face folder.
"""

from megasync.models.fetch import MODELS, fetch

__all__ = ["MODELS", "fetch"]
