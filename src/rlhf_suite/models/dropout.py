"""The dropout of a model: the rates of its configuration, and whether it has any in training."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from rlhf_suite.models.wrapped import WrappedModel

# transformers has no common name: attn_pdrop, resid_pdrop, dropout, attention_dropout, layerdrop, router_jitter_noise.
DROPOUT_MARKS = ("drop", "jitter")


def switch_off_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Set every dropout rate in `config` and its nested configurations to 0. Return the rates above 0 by their dotted
    names."""
    rates = dict(dropout_rates(config))
    set_dropout(config, dict.fromkeys(rates, 0.0))
    return rates


def dropout_rates(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dropout rates above 0, by their dotted names."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from dropout_rates(value, f"{prefix}{name}.")
        elif isinstance(value, float) and value > 0 and any(mark in name for mark in DROPOUT_MARKS):
            yield f"{prefix}{name}", value


def set_dropout(config: PretrainedConfig, rates: dict[str, float]) -> None:
    """Set the dropout rates of these dotted names."""
    for name, rate in rates.items():
        *sections, last = name.split(".")
        owner = config
        for section in sections:
            owner = getattr(owner, section)
        setattr(owner, last, rate)


def drops_out(module: WrappedModel) -> bool:
    """Return whether a model has dropout in training, in its layers or in its adapters."""
    own = any(dropout_rates(module.model.config))
    return own or (module.lora is not None and getattr(module.lora, "lora_dropout", 0) > 0)
