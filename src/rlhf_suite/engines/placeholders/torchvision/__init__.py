"""Names of torchvision, for processes of engines where it is not installed.

The files of vLLM for models that read images import them through transformers, also where a run has text alone. PyPI's
torchvision is linked to CUDA and does not import beside a torch for the CPU. Enumerations have their values; whatever
else is called raises an error that says what is missing.
"""

from __future__ import annotations

import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.28.0"  # that which belongs to the torch of the engines for the CPU
MODULES = ("io", "ops", "ops.boxes", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")


class InterpolationMode(Enum):
    """Ways to resize an image, by the names that transformers takes for those of Pillow."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ImageReadMode(Enum):
    """Ways to read an image file."""

    UNCHANGED = 0
    GRAY = 1
    GRAY_ALPHA = 2
    RGB = 3
    RGB_ALPHA = 4


class Names(ModuleType):
    """A module that has every name: what it names may be imported, and raises an error when it is called."""

    InterpolationMode = InterpolationMode
    ImageReadMode = ImageReadMode

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        missing = type(name, (), {"__new__": _refuse, "__module__": self.__name__})
        setattr(self, name, missing)
        return missing


def _refuse(kind: type, *arguments: object, **settings: object) -> object:
    """Raise the error of a name that is called."""
    raise RuntimeError(
        f"{kind.__module__}.{kind.__name__} was called, and torchvision is not installed; "
        "install the build of torchvision for this torch"
    )


for _path in MODULES:
    _module = Names(f"{__name__}.{_path}")
    _module.__spec__ = ModuleSpec(_module.__name__, None, is_package=True)
    _module.__path__ = []
    _parent, _, _leaf = _module.__name__.rpartition(".")
    sys.modules[_module.__name__] = _module
    setattr(sys.modules[_parent], _leaf, _module)
