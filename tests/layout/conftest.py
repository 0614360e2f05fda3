from hf_models import make_model, models, save_model

__all__ = ["make_model", "models", "save_model"]
