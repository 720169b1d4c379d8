"""Documents beside the samples of the policy, so that it forgets less (data.pretrain_dataset, PPO-ptx)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.batch import Example, TokenBatch
from rlhf_suite.data.row import BadRows
from rlhf_suite.data.sources import DOCUMENTS, Sources
from rlhf_suite.data.text_encoders import DocumentEncoder
from rlhf_suite.data.trajectory import Experience
from rlhf_suite.losses.tokens import next_token_loss
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.rl.objectives import PolicyObjective
from rlhf_suite.train.task import Forward, StepLoss

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_suite.data.load import Shown

UNIT = "document_tokens"


@dataclass(frozen=True)
class Documents:
    """Windows of documents, each of at most data.max_len tokens, and what there is to say about them."""

    windows: Sequence[Example]
    notes: str
    contents_digest: str  # of the files that they come from


def load_documents(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, shown: Shown | None = None
) -> Documents | None:
    """Read and encode the documents of a run, which are cut as in continued pre-training; None if it has none. `shown`
    may show how many are encoded."""
    if data.pretrain_dataset is None:
        return None
    from rlhf_suite.data.load import Loader, show_nothing  # pyarrow: a policy without documents needs none

    own = {"row_format": None, "max_samples": None, "image_key": None, "input_key": data.pretrain_key}
    config, bad = data.as_of("sft", **own), BadRows(data.on_bad_row)
    loader: Loader[Example] = Loader(DocumentEncoder(tokenizer, config), config, seed, bad, shown or show_nothing)
    sources = Sources(data.pretrain_dataset, data.pretrain_split, None, data.pretrain_probs, DOCUMENTS)
    return Documents(loader.load(sources), bad.summary(), loader.contents_digest)


@dataclass
class WithDocuments:
    """Minimise the objective of the policy on its samples + coef x the mean next-token loss on documents.

    Every micro-batch of a step is of one kind.
    """

    policy: PolicyObjective
    coef: float

    def units(self, batch: TokenBatch) -> dict[str, torch.Tensor]:
        tokens = batch.mask.sum()
        if isinstance(batch, Experience):
            return {**self.policy.units(batch), UNIT: torch.zeros_like(tokens)}
        return {"tokens": torch.zeros_like(tokens), "policy_units": torch.zeros_like(tokens), UNIT: tokens}

    def loss(self, model: Forward, batch: TokenBatch) -> StepLoss:
        if isinstance(batch, Experience):
            return self.policy.loss(model, batch)
        log_probs = token_log_probs(model, batch, masked=True).log_probs
        language = next_token_loss(log_probs, batch.mask)
        return StepLoss({UNIT: self.coef * language.total}, {"ptx_loss": language.metrics["gpt_loss"]})
