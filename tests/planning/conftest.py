from sound_config import make, model

__all__ = ["make", "model"]
