"""A reward model on one device that scores texts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoConfig, PretrainedConfig

from rlhf_suite.config.data import DataConfig
from rlhf_suite.config.ds import LoadedConfig, ServedModelConfig, is_flash
from rlhf_suite.config.launch import trusts_code
from rlhf_suite.config.reward import NormalizationConfig
from rlhf_suite.data.batch import Example, TokenBatch, collate
from rlhf_suite.data.render import begin_ids, tokens
from rlhf_suite.errors import UserError
from rlhf_suite.models.forward import ScalarModel, sequence_scores
from rlhf_suite.models.load import checkpoint_precision, load_model, load_tokenizer, model_folder

FLAG = "reward.model_name_or_path"


class RewardModel:
    """A model whose score of a text is its head at the last token.

    `constants` are the mean and standard deviation that scores are standardised by, or None.
    """

    def __init__(self, path: str, ds: ServedModelConfig, device: str, constants: tuple[float, float] | None) -> None:
        self.tokenizer = load_tokenizer(path, DataConfig(), FLAG)
        self.begin = begin_ids(self.tokenizer)
        model = load_model(path, head="value", ds=forward_config(path, ds), flag=FLAG)
        check_head_is_trained(model, path, FLAG)
        self.model = model.to(device).requires_grad_(False)
        self.device = device
        self.mean, self.std = constants or (0.0, 1.0)

    @property
    def positions(self) -> int | None:
        """Return how many tokens the model was made for; None if its configuration does not say."""
        config: PretrainedConfig = self.model.model.config
        limit = getattr(config.get_text_config(), "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def longest_token(self) -> int:
        """Return the number of characters of the longest token. A text with more than n times as many has more than n
        tokens."""
        return max(map(len, self.tokenizer.get_vocab()))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; special tokens in the text are read as such."""
        return tokens(self.tokenizer, text, self.begin)

    @torch.inference_mode()
    def scores(self, sequences: Sequence[list[int]]) -> list[float]:
        """Return one score per sequence of token ids."""
        batch = collate([Example(ids, [0] * len(ids)) for ids in sequences], TokenBatch).to(self.device)
        found: torch.Tensor = (sequence_scores(self.model, batch) - self.mean) / self.std
        return found.tolist()


def forward_config(path: str, ds: ServedModelConfig) -> LoadedConfig:
    """Return the settings of the model's forward pass. The default precision is that of its checkpoint."""
    precision = ds.param_dtype or checkpoint_precision(path, FLAG)
    if precision == "fp32" and is_flash(ds.attn_implementation):
        raise UserError(
            f"ds.attn_implementation={ds.attn_implementation}: it has no fp32 kernels, and {FLAG}={path} is not in "
            "bf16. Write ds.param_dtype=bf16, or ds.attn_implementation=varlen"
        )
    return LoadedConfig(
        precision,
        ds.attn_implementation,
        experts_implementation=ds.experts_implementation,
        packing_samples=ds.packing_samples,
        value_head_prefix=ds.value_head_prefix,
        load_in_4bit=ds.load_in_4bit,
    )


def check_head_is_trained(model: ScalarModel, path: str, flag: str) -> None:
    """Raise UserError if the head was drawn at random."""
    if model.head_is_new:
        raise UserError(
            f"{flag}={path}: the checkpoint has no head named {model.head_name!r} (ds.value_head_prefix), so it cannot "
            "score. Give a reward model, or the name of its head"
        )


def score_constants(path: str | None, config: NormalizationConfig) -> tuple[float, float] | None:
    """Return the mean and standard deviation for reward.normalize_enable from config.json; None if the flag is off.

    Where scores are only centred (reward.normalize_mean_only) the deviation is 1, whatever config.json says.

    Raises:
        UserError: config.json has none, so the scores would silently stay as they are.
    """
    if not config.normalize_enable:
        return None
    assert path is not None, "checked with the flags"
    stats = reward_stats(AutoConfig.from_pretrained(model_folder(path, FLAG), trust_remote_code=trusts_code()))
    if stats is None or (stats[1] <= 0 and not config.normalize_mean_only):
        found = "has no reward_mean and reward_std" if stats is None else f"has reward_std={stats[1]:g}"
        raise UserError(
            f"reward.normalize_enable=true, but config.json of {FLAG}={path} {found}: write the mean and the standard "
            "deviation of its scores there, or remove the flag"
        )
    return (stats[0], 1.0) if config.normalize_mean_only else stats


def reward_stats(config: PretrainedConfig) -> tuple[float, float] | None:
    """Return the mean and standard deviation of a reward model's scores, if its config.json has them."""
    for mean, std in (("reward_mean", "reward_std"), ("mean", "std")):  # the second pair is OpenRLHF's
        if hasattr(config, mean) and hasattr(config, std):
            return float(getattr(config, mean)), float(getattr(config, std))
    return None
