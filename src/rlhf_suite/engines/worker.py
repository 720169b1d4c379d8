"""What every process with the model of an engine imports before vLLM loads it. Importing this module registers the
transfer backends, mends rotary positions and the attention of images, and offers the names of torchvision that vLLM's
files import."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

PLACEHOLDERS = Path(__file__).parent / "placeholders"  # packages that stand for those that are not installed


class WorkerExtension:
    """An empty class. Worker processes import this module because of it."""


def offer_torchvision() -> None:
    """Let this process, and those that it starts, import the names of torchvision where it is not installed. Images are
    then read by Pillow, as in the trainer."""
    if find_spec("torchvision") is None:
        sys.path.append(str(PLACEHOLDERS))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(PLACEHOLDERS))))
    spec = find_spec("torchvision")
    if spec is not None and Path(spec.origin or "").is_relative_to(PLACEHOLDERS):
        from transformers.models.auto import image_processing_auto

        # Transformers takes the placeholder for the package, so it would choose processors that call it.
        image_processing_auto.is_torchvision_available = lambda: False


offer_torchvision()

# vLLM is imported after the names are there.
from rlhf_suite.engines.cpu_kernels import mend_image_attention, mend_rotary_positions  # noqa: E402
from rlhf_suite.weight_sync import receiver  # noqa: E402, F401

mend_rotary_positions()
mend_image_attention()
