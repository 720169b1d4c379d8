"""`ref`: the frozen reference policy."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_suite.config.flags import flag


@dataclass
class ReferenceConfig:
    """The frozen reference; exists when algo.kl.init_coef > 0"""

    model_name_or_path: str | None = flag(None, "HF folder or hub name; null: the actor's starting weights")
    offload: bool = flag(False, "Hold its weights in host memory, and bring them to the GPU for each forward pass")
    num_nodes: int = flag(1, "Nodes of the reference's worker group", ge=1)
    num_gpus_per_node: int = flag(1, "Ranks per node", ge=1)


@dataclass
class PreferenceReferenceConfig:
    """The frozen reference that preferences are measured against"""

    model_name_or_path: str | None = flag(
        None, "HF folder or hub name; null: the actor's starting weights (with LoRA: the actor without its adapters)"
    )
    offload: bool = flag(False, "Hold its weights in host memory, and bring them to the GPU for each forward pass")
    cache_enable: bool = flag(
        False, "Compute its log-probs once before training, keep them on disk by content, and hold no reference model"
    )
