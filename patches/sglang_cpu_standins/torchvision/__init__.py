"""Stand-in for torchvision: a server of text models calls none of it."""

import enum

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


import torchvision.transforms as transforms  # noqa: E402 - needs __getattr__ above
import torchvision.transforms.functional  # noqa: E402
import torchvision.transforms.v2.functional  # noqa: E402

for _module in (transforms, transforms.functional, transforms.v2.functional):
    _module.InterpolationMode = InterpolationMode
