"""What a model keeps in memory while it computes: its real code runs on tensors that have shapes but no content.

On torch's device `meta` a forward and backward pass takes a second or two for any size. Every tensor that appears is
counted from its birth to its end, so the most bytes at one time are known for any architecture, with or without
adapters and gradient checkpointing, and include what exists for a moment only. Parameters are not counted, and the
gradient of a parameter only until it is complete: `memory.py` knows where it goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from rlhf_suite.config.declarations.ds import DeepSpeedConfig, load_settings, wanted_packing
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.data.batch import TokenBatch
from rlhf_suite.errors import UserError
from rlhf_suite.models.attention import SequenceLayout
from rlhf_suite.models.classes import auto_class, build_from_config
from rlhf_suite.models.dropout import switch_off_dropout
from rlhf_suite.models.families import num_experts
from rlhf_suite.models.forward import LanguageModel, ScalarModel, compute_hidden_states
from rlhf_suite.models.load import DTYPES, model_config, model_folder
from rlhf_suite.models.load_errors import explain_load_errors, quiet_transformers
from rlhf_suite.models.prepare import make_trainable

# Attention that keeps what a flash kernel keeps; and one that keeps a copy of its output as well.
FLASH, COPIED = "planned", "planned_copied"
META = torch.device("meta")
FAILURES = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class Tokens:
    """A micro-batch of `sequences` that are `length` tokens long each."""

    sequences: int
    length: int

    @property
    def total(self) -> int:
        return self.sequences * self.length


@dataclass(frozen=True)
class Trace:
    """Bytes beside parameters: the most at one time in a forward and backward pass, and in a forward pass without
    gradients."""

    training: int
    inference: int


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model as a rank would hold them without ZeRO: numbers of elements."""

    trained: int
    frozen: int
    quantizable: int  # of the frozen ones: those that ds.load_in_4bit keeps in 4 bits
    largest: int  # of any parameter
    matrices_trained: int  # those that every token is multiplied with
    matrices_frozen: int
    attention: int  # heads of all layers times their size
    kv_per_token: int  # keys and values of a token in all layers
    kv_heads: int  # of a layer
    hidden: int
    vocabulary: int

    @property
    def total(self) -> int:
        return self.trained + self.frozen


@dataclass(frozen=True)
class Use:
    """All that the memory of one model depends on beside its tokens."""

    path: str
    flag: str
    head: Literal["lm", "value"]
    dtype: str
    attention: str | None = None
    packed: bool | None = None
    experts: str | None = None
    on_gpu: bool = True
    tensor: int = 1
    lora: tuple[int, tuple[str, ...]] = (0, ())
    freeze: tuple[str, ...] = ()
    freeze_router: bool = False
    trained: bool = True
    checkpointing: bool = False
    aux_loss: float = 0.0
    entropy: bool = False

    @staticmethod
    def of(model: ModelPlan, ds: DeepSpeedConfig, section: TrainedModelConfig | None, on_gpu: bool) -> Use:
        """Return how a run uses a model; a frozen one has no `section`."""
        use = Use(
            model.path,
            model.flag,
            model.head,
            ds.precision,
            attention=ds.attn_implementation,
            packed=wanted_packing(ds),
            experts=ds.experts_implementation if model.name == "actor" else None,
            on_gpu=on_gpu,
            tensor=ds.tensor_parallel_size,
            trained=section is not None,
        )
        if section is None:
            return use
        return replace(
            use,
            lora=(ds.lora.rank, tuple(ds.lora.target_modules)),
            freeze=tuple(section.freeze),
            freeze_router=section.freeze_router,
            checkpointing=bool(section.gradient_checkpointing_enable),
            aux_loss=section.aux_loss_coef,
            entropy=getattr(section, "entropy_coef", None) is not None,
        )


@lru_cache(maxsize=8)
def meta_model(use: Use) -> LanguageModel | ScalarModel:
    """Return the model without content, in training mode, with the adapters and frozen parameters that `use` says.

    Raises:
        UserError: the model cannot be built so.
    """
    ds = load_settings(param_dtype=use.dtype, experts_implementation=use.experts)
    with explain_load_errors(use.flag, use.path), quiet_transformers():
        config = model_config(model_folder(use.path, use.flag), use.head, ds)
        switch_off_dropout(config)
        split_heads(config.get_text_config(), use.tensor)
        with META:
            kernel = use.attention if use.attention == "eager" else FLASH if use.on_gpu else COPIED
            kind = auto_class(use.head, False, config)
            model = build_from_config(kind, config, dtype=DTYPES[use.dtype], attn_implementation=kernel)
            module: LanguageModel | ScalarModel
            module = LanguageModel(model, False) if use.head == "lm" else ScalarModel(model, False)
            module.packed = module.family.packs(use.packed, use.attention)
            section = TrainedModelConfig.of(
                "ppo",
                freeze=list(use.freeze),
                freeze_router=use.freeze_router,
                gradient_checkpointing_enable=use.checkpointing,
                aux_loss_coef=use.aux_loss,
            )
            rank, targets = use.lora
            lora = replace(ds.lora, rank=rank, target_modules=list(targets))
            make_trainable(module, section, lora, section=use.flag.partition(".")[0])
    module.to(DTYPES[use.dtype])  # adapters get the type of the weights that they adapt
    if not use.trained:
        module.requires_grad_(False)
    return module


def split_heads(config: PretrainedConfig, size: int) -> None:
    """Have each layer as one of `size` ranks of the tensor axis holds it: a part of its heads and of its inner size."""
    if size == 1:
        return
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name, None):
            setattr(config, name, max(1, getattr(config, name) // size))


@lru_cache(maxsize=32)
def parameters(use: Use) -> Parameters:
    """Return what parameters a model has."""
    module = meta_model(use)
    config = module.model.config.get_text_config()
    share = active_experts(config)
    linear = {submodule.weight for submodule in module.modules() if type(submodule) is nn.Linear}
    heads = {module.model.score.weight} if isinstance(module, ScalarModel) else set()
    looked_up = set() if is_tied(module) else {module.model.get_input_embeddings().weight}
    sizes = [(p, p.numel()) for p in module.parameters()]
    used = [(p, size * (share if p.ndim == 3 else 1)) for p, size in sizes if p.ndim > 1 and p not in looked_up]
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return Parameters(
        trained=sum(size for p, size in sizes if p.requires_grad),
        frozen=sum(size for p, size in sizes if not p.requires_grad),
        quantizable=sum(size for p, size in sizes if not p.requires_grad and p in linear - heads),
        largest=max(size for _, size in sizes),
        matrices_trained=round(sum(size for p, size in used if p.requires_grad)),
        matrices_frozen=round(sum(size for p, size in used if not p.requires_grad)),
        attention=config.num_hidden_layers * config.num_attention_heads * head_size,
        kv_per_token=2 * config.num_hidden_layers * kv_heads * head_size,
        kv_heads=kv_heads,
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
    )


def is_tied(module: LanguageModel | ScalarModel) -> bool:
    """Return whether the embedding is the head too, so that tokens are multiplied with it."""
    if isinstance(module, ScalarModel):
        return False
    return module.model.get_output_embeddings().weight is module.model.get_input_embeddings().weight


def active_experts(config: PretrainedConfig) -> float:
    """Return the share of its experts that a token goes through; 1 without experts."""
    experts = num_experts(lambda name: getattr(config, name, None))
    return config.num_experts_per_tok / experts[1] if experts else 1.0


@lru_cache(maxsize=64)
def trace(use: Use, tokens: Tokens) -> Trace:
    """Return what passes over a micro-batch keep.

    Raises:
        UserError: the model's code needs the content of its tensors, or more than shapes.
    """
    module = meta_model(use)
    try:
        with torch.no_grad(), no_autocast_of_meta(), Live(module) as inference:
            compute(module, tokens, use.entropy)
        if not use.trained:
            return Trace(0, inference.peak)
        hooks = [p.register_post_accumulate_grad_hook(drop) for p in module.parameters() if p.requires_grad]
        try:
            with no_autocast_of_meta(), Live(module) as training:
                torch.autograd.backward([compute(module, tokens, use.entropy)])
        finally:
            for hook in hooks:
                hook.remove()
    except FAILURES as error:
        raise UserError(
            f"{use.flag}={use.path}: {type(module.model).__name__} cannot be planned, since it does not run on tensors "
            f"without content ({str(error).splitlines()[0]})"
        ) from error
    return Trace(training.peak, inference.peak)


def compute(module: LanguageModel | ScalarModel, tokens: Tokens, entropy: bool) -> Tensor:
    """Return a sum of log-probs of all tokens, or of a scalar head's outputs: as large as any objective."""
    batch = TokenBatch(ids(tokens.total), ids(tokens.sequences), ids(tokens.total).float())
    layout = SequenceLayout(
        module.packed,
        ids(tokens.sequences + 1).int(),
        tokens.length,
        ids(tokens.total),
        ids(tokens.total),
        ((tokens.sequences, tokens.length),),
    )
    states, routers = compute_hidden_states(module, batch, layout, module.balance is not None)
    if isinstance(module, ScalarModel):
        return module.model.score(states).squeeze(-1).float().sum()
    head = module.model.get_output_embeddings()
    log_probs, entropies = head(states, ids(tokens.total), entropy=entropy)
    total: Tensor = log_probs.sum()
    total = total if entropies is None else total + entropies.sum()
    return sum((router.float().sum() for router in routers), total)


@contextmanager
def no_autocast_of_meta() -> Iterator[None]:
    """Let adapters of experts switch autocast off for a tensor without content: torch knows none for its device."""
    known = torch.autocast

    def autocast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return nullcontext() if device_type == META.type else known(device_type, *args, **kwargs)

    torch.autocast = autocast  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        torch.autocast = known  # type: ignore[misc]


def ids(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.long, device=META)


def drop(parameter: Tensor) -> None:
    parameter.grad = None


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that exist within the block and are not parameters; `peak` is the most."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.known = {storage_of(parameter)._cdata for parameter in [*module.parameters(), *module.buffers()]}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1  # transformers asks whether positions restart; all sequences are told to it otherwise
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.see(storage_of(leaf))
        return result

    def see(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.known:
            self.known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.forget, key, size)

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def storage_of(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


class _Flash(torch.autograd.Function):
    """Attention that computes nothing, and keeps what a flash kernel keeps: queries, keys, values, the output, and a
    number per query and head in fp32 (Dao, arXiv:2307.08691, section 3.1)."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, length, _ = query.shape
        output = query.new_empty(rows, length, heads, value.shape[-1])
        ctx.save_for_backward(query, key, value, output, query.new_empty(rows, heads, length, dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors[:3])


def flash(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """Stand for the flash kernels of GPUs, [B, H, L, D] to [B, L, H, D]."""
    return _Flash.apply(query, key, value), None


def copy_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    """Stand for attention by torch's SDPA, whose outputs `attend_packed` joins to a new tensor."""
    return torch.cat([_Flash.apply(query, key, value)]), None


for name, kernel in ((FLASH, flash), (COPIED, copy_attention)):
    AttentionInterface.register(name, kernel)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
