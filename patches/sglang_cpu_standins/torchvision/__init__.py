"""Stand-in for torchvision: a server of text models calls none of it."""

import enum
import importlib

import _absent

__version__ = "0.28.0"
__getattr__ = _absent.install("torchvision")


class InterpolationMode(enum.Enum):
    """Read member by member when transformers' image code is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


for _name in ("transforms", "transforms.functional", "transforms.v2.functional"):
    importlib.import_module(f"torchvision.{_name}").InterpolationMode = InterpolationMode
