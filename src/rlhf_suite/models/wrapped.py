"""What the forward pass has to know of a model of transformers, whatever its head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from transformers import PreTrainedModel

from rlhf_suite.models.families import Family
from rlhf_suite.models.sequence_parallel import SequenceGroup
from rlhf_suite.models.vision import VisionProcessor

if TYPE_CHECKING:
    from peft import PeftConfig


class WrappedModel(nn.Module):
    """A model of transformers, and how it takes its batches."""

    def __init__(self, model: PreTrainedModel, family: Family, packed: bool, vision: VisionProcessor | None) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.vision = vision  # None: it reads no images
        self.packed = packed
        self.share_prefixes: bool | None = None  # ds.share_prefixes
        self.sequence_group: SequenceGroup | None = None  # the ranks that split the tokens of each batch
        self.lora: PeftConfig | None = None
        self.dropout_off: dict[str, float] = {}  # rates of the saved configuration that were switched off
