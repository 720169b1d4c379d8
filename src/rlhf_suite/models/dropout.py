"""Dropout of a model's own configuration: found by name, switched off, and written back when the model is saved."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

# transformers has no common name: attn_pdrop, resid_pdrop, dropout, attention_dropout, layerdrop, router_jitter_noise.
MARKS = ("drop", "jitter")


def switch_off_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Set every dropout rate in `config`, and in the configurations inside it, to 0. Return the rates that were above 0
    by their dotted names."""
    rates = dict(dropout_rates(config))
    set_dropout(config, dict.fromkeys(rates, 0.0))
    return rates


def dropout_rates(config: PretrainedConfig, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the dropout rates above 0, by their dotted names."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from dropout_rates(value, f"{prefix}{name}.")
        elif isinstance(value, float) and value > 0 and any(mark in name for mark in MARKS):
            yield f"{prefix}{name}", value


def set_dropout(config: PretrainedConfig, rates: dict[str, float]) -> None:
    """Set the dropout rates of these dotted names."""
    for name, rate in rates.items():
        *sections, last = name.split(".")
        owner = config
        for section in sections:
            owner = getattr(owner, section)
        setattr(owner, last, rate)
