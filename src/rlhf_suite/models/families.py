"""What each family of models is made of, and what it cannot do, declared once.

Loading, attention, the head, the checks before a run, the planner and docs/support.md read this. A family is known by
the `model_type` of its config.json, so nothing here needs torch. A type without a declaration is taken for a
transformer with full or sliding attention; layers of other kinds then run without packing, by the attention of
transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Kinds of layers, as `layer_types` of config.json names them.
FULL, SLIDING, CHUNKED, LINEAR, CONVOLUTION = (
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention", "conv"),
)
# Ways to compute attention (ds.attn_implementation); FLASH stands for all flash kernels.
VARLEN, SDPA, EAGER, FLASH = "varlen", "sdpa", "eager", "flash"
# What a run may ask of a family.
PACKED, SEQUENCE, BLOCKS, TENSOR = "packed rows", "sequence parallelism", "gather and ring", "tensor parallelism"
PREFIXES = "shared prefixes"
ENGINE, ADAPTERS = "an engine without a GPU", "adapters apart from the weights of an engine"
# Settings by which some heads change their logits; what they mean depends on the family.
HEAD_SETTINGS = (
    *("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap", "logit_scale", "logits_scaling"),
    *("lm_head_multiplier", "output_multiplier"),
)
NARROW = 128  # experts whose numbers fit a signed byte
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # settings of mixtures of experts


@dataclass(frozen=True)
class Head:
    """The settings by which a language head changes its logits, in the order in which it applies them."""

    multiplier: str | None = None
    divisor: str | None = None
    cap: str | None = None  # logits become cap * tanh(logits / cap)

    @property
    def settings(self) -> tuple[str, ...]:
        return tuple(name for name in (self.multiplier, self.divisor, self.cap) if name is not None)


PLAIN, CAPPED, DIVIDED = Head(), Head(cap="final_logit_softcapping"), Head(divisor="logits_scaling")


@dataclass(frozen=True)
class Images:
    """How a family reads images."""

    tower: tuple[str, ...]  # the modules that only images pass through
    pixels: tuple[str, ...]  # what the processor returns of an image, laid end to end for all images
    has_tile_rows: bool = False  # whether `pixels` are [1, tiles, ...] for the model; all-zero tiles mean padding
    sees_whole: bool = False  # whether each token of an image sees all tokens of the image, also later ones
    has_newlines: bool = False  # whether newlines stand around an image, which join those of the text
    has_axes: bool = False  # whether tokens have positions in time, height and width, and images a grid


@dataclass(frozen=True)
class Kernels:
    """What vLLM's kernels without a GPU can compute of a family."""

    dtype: str | None = None  # ds.param_dtype; None: any
    states: tuple[str, ...] = ()  # settings of the sizes of states, all of which must be the same one of `sizes`
    sizes: tuple[int, ...] = ()
    no_layers: tuple[str, ...] = ()  # layers without a kernel, as config.json names or abbreviates them


@dataclass(frozen=True)
class Family:
    """A family of models, with the names that transformers gives to its parts."""

    title: str
    types: tuple[str, ...]  # `model_type` of config.json, of the model or of its text part
    layers: tuple[str, ...] = (FULL, SLIDING)
    state: str = ""  # what the layers are called that carry a state from token to token
    mixers: tuple[str, ...] = ()  # the classes of these layers
    router: str = ""  # the class of the routers of its experts, whose choice can be replayed
    scores: str = ""  # what changes its attention scores, beside a scale and a window
    head: Head = PLAIN
    attention: tuple[str, ...] = (VARLEN, SDPA, EAGER, FLASH)  # the best first
    images: Images | None = None  # None also for a model without the tower
    unadapted: tuple[str, ...] = ()  # linear modules that ds.lora.target_modules=all-linear leaves out
    refused: Mapping[str, str] = field(default_factory=dict)  # what it cannot do, with the reason
    kernels: Kernels = Kernels()
    transposed: tuple[str, ...] = ()  # ends of the names of matrices that checkpoints have transposed
    completed: Mapping[str, Any] = field(default_factory=dict)  # settings that vLLM reads and transformers leaves out

    def why_not(self, feature: str) -> str | None:
        """Return the reason why a family cannot do something; None if it can."""
        if feature in self.refused:
            return self.refused[feature]
        if feature in (SEQUENCE, PREFIXES) and PACKED in self.refused:
            return self.refused[PACKED]
        if feature in (SEQUENCE, TENSOR, PREFIXES) and self.mixers:
            where = "in one sequence" if feature == PREFIXES else "on one rank"
            return f"has {self.state} layers, whose state goes from token to token {where}"
        if feature == BLOCKS and self.scores:
            return f"has {self.scores} in its attention"
        if feature == TENSOR and self.images is not None:
            return "reads images"
        return None

    def computes(self, attention: str) -> bool:
        """Return whether a value of ds.attn_implementation computes the attention of this family."""
        return attention in self.attention or (attention not in (VARLEN, SDPA, EAGER) and FLASH in self.attention)

    def packs(self, wanted: bool | None, attention: str | None) -> bool:
        """Return whether sequences are laid end to end: as ds.packing_samples wants it, or by default where the family
        and its attention, a value of ds.attn_implementation, can."""
        if wanted is not None:
            return wanted
        return self.why_not(PACKED) is None and (attention or self.attention[0]) not in (SDPA, EAGER)


NO_RELOAD = "cannot get other weights in vLLM 0.32"
JOINED = "has gates and values in one matrix, which vLLM adapts apart"
GRIDS = Images(("model.visual",), ("pixel_values", "image_grid_thw"), has_axes=True)
GATED_DELTA = Kernels("bf16", ("linear_key_head_dim", "linear_value_head_dim"), (64, 128))
PROJECTED = Images(("model.vision_tower", "model.multi_modal_projector"), ("pixel_values",))
WHOLE = replace(PROJECTED, sees_whole=True, has_newlines=True)

FAMILIES = (
    Family("Llama", ("llama",)),
    Family("Mistral", ("mistral",)),
    Family("Ministral", ("ministral", "ministral3")),
    Family("Mixtral", ("mixtral",), router="MixtralTopKRouter"),
    Family("Qwen2", ("qwen2",)),
    Family("Qwen2-MoE", ("qwen2_moe",), router="Qwen2MoeTopKRouter"),
    Family("Qwen3", ("qwen3",)),
    Family("Qwen3-MoE", ("qwen3_moe",), router="Qwen3MoeTopKRouter"),
    Family("SmolLM3", ("smollm3",)),
    Family("Phi-3, Phi-4", ("phi3",)),
    Family("OLMo 2", ("olmo2",)),
    Family("OLMo 3", ("olmo3",)),
    Family("GLM-4", ("glm4",), refused={ADAPTERS: JOINED}),
    Family("GLM-4.5, GLM-4.6, GLM-4.7", ("glm4_moe",), router="Glm4MoeTopkRouter"),
    Family(
        "DeepSeek-V3, Kimi K2",
        ("deepseek_v3",),
        router="DeepseekV3TopkRouter",
        completed={"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    Family("MiniMax-M2", ("minimax_m2",), refused={ENGINE: NO_RELOAD}),
    Family("Gemma", ("gemma",)),
    Family(
        "Gemma 2",
        ("gemma2",),
        scores="a soft cap",
        head=CAPPED,
        attention=(VARLEN, EAGER),
    ),
    Family("Gemma 3", ("gemma3_text", "gemma3"), head=CAPPED, images=WHOLE),
    Family("Gemma 4", ("gemma4_text", "gemma4"), head=CAPPED),
    Family("Granite", ("granite",), head=DIVIDED),
    Family("Granite-MoE", ("granitemoe", "granitemoeshared"), head=DIVIDED),
    Family("Command", ("cohere", "cohere2"), head=Head(multiplier="logit_scale")),
    Family(
        "gpt-oss",
        ("gpt_oss",),
        router="GptOssTopKRouter",
        scores="attention sinks",
        attention=(VARLEN, EAGER),
        refused={TENSOR: "has attention sinks, which are not split with the heads"},
    ),
    Family(
        "Llama 4",
        ("llama4_text", "llama4"),
        layers=(FULL, CHUNKED),
        attention=(SDPA, EAGER),
        unadapted=("router",),  # it returns two tensors
        refused={
            PACKED: "counts the positions of its attention temperature from the start of a row",
            ADAPTERS: "cannot load its experts in vLLM 0.32 where it takes adapters",
        },
    ),
    Family(
        "Qwen3-Next",
        ("qwen3_next",),
        layers=(FULL, LINEAR),
        state="gated-delta",
        mixers=("Qwen3NextGatedDeltaNet",),
        kernels=GATED_DELTA,
    ),
    Family(
        "Qwen3.5",
        ("qwen3_5_text", "qwen3_5"),
        layers=(FULL, LINEAR),
        state="gated-delta",
        mixers=("Qwen3_5GatedDeltaNet",),
        kernels=GATED_DELTA,
        images=GRIDS,
    ),
    Family(
        "Qwen3.5-MoE",
        ("qwen3_5_moe_text", "qwen3_5_moe"),
        layers=(FULL, LINEAR),
        state="gated-delta",
        mixers=("Qwen3_5MoeGatedDeltaNet",),
        kernels=GATED_DELTA,
        images=GRIDS,
    ),
    Family(
        "OLMo-hybrid",
        ("olmo_hybrid",),
        layers=(FULL, LINEAR),
        state="gated-delta",
        mixers=("OlmoHybridGatedDeltaNet",),
        refused={ENGINE: "needs kernels of Triton in vLLM"},
    ),
    Family(
        "Kimi-Linear",
        ("kimi_linear",),
        layers=(FULL, LINEAR),
        state="delta-attention",
        mixers=("KimiLinearDeltaAttention",),
        refused={ENGINE: "needs kernels of Triton in vLLM"},
    ),
    Family("LFM2", ("lfm2",), layers=(FULL, CONVOLUTION), state="convolution", mixers=("Lfm2ShortConv",)),
    Family("LFM2-MoE", ("lfm2_moe",), layers=(FULL, CONVOLUTION), state="convolution", mixers=("Lfm2MoeShortConv",)),
    Family(
        "Nemotron-H",
        ("nemotron_h",),
        layers=(FULL, LINEAR, "mlp", "moe"),
        state="Mamba",
        mixers=("NemotronHMamba2Mixer",),
        unadapted=("out_proj",),  # kernels read its weight
        kernels=Kernels(no_layers=("moe", "E")),
    ),
    Family(
        "Granite-hybrid",
        ("granitemoehybrid",),
        layers=(FULL, LINEAR),
        state="Mamba",
        mixers=("GraniteMoeHybridMambaLayer",),
        unadapted=("out_proj",),
        head=DIVIDED,
    ),
    Family(
        "Idefics3, SmolVLM",
        ("idefics3",),
        images=Images(("model.vision_model", "model.connector"), ("pixel_values",), has_tile_rows=True),
    ),
    Family("Qwen2-VL", ("qwen2_vl", "qwen2_vl_text"), images=GRIDS),
    Family("Qwen2.5-VL", ("qwen2_5_vl", "qwen2_5_vl_text"), images=GRIDS),
    Family("Qwen3-VL", ("qwen3_vl", "qwen3_vl_text"), images=GRIDS),
    Family(
        "Qwen3-VL-MoE",
        ("qwen3_vl_moe", "qwen3_vl_moe_text"),
        images=GRIDS,
        completed={"norm_topk_prob": True},
        transposed=("experts.gate_up_proj", "experts.down_proj"),
    ),
    Family(
        "GLM-4.1V",
        ("glm4v", "glm4v_text"),
        images=GRIDS,
        refused={ADAPTERS: JOINED},
        completed={"attention_bias": True},
    ),
    Family("LLaVA", ("llava",), images=PROJECTED),
    Family("InternVL", ("internvl",), images=PROJECTED),
)
BY_TYPE = {name: family for family in FAMILIES for name in family.types}
IMAGE_TYPES = tuple(
    name for name, family in BY_TYPE.items() if family.images is not None and not name.endswith("_text")
)
# Types whose images are not read here, with the reason.
SIZES = "its tower needs the size of each image beside its pixels"
UNREAD = {
    "gemma4": "the tokens of an image see later ones in its layers with a window alone, not in all",
    "gemma4_unified": "the tokens of an image see later ones in its layers with a window alone, not in all",
    "glm46v": "vLLM has no model of this type",
    "llava_next": SIZES,
    "llava_onevision": "how many tokens an image has depends on how many images are beside it",
    "mistral3": SIZES,
    "mllama": "its images have no tokens in the sequence: layers of cross-attention read them",
    "paligemma": "all tokens of a prompt see later ones",
    "pixtral": SIZES,
    "smolvlm": "its processor needs the package num2words",
}
UNCOMPARED = "images of this type have not been compared with transformers"
# Types without a declaration whose layers carry a state from token to token, which nothing resets in a packed row.
STATEFUL = (
    *("bamba", "deepseek_v4", "falcon_h1", "falcon_mamba", "glm5_next", "jamba", "mamba", "mamba2", "minicpmv4_6"),
    *("minicpmv4_7", "nemotron_h_omni", "qwen4_exp", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2", "zaya"),
)
CARRIES = "carries a state from token to token, also from one packed sequence into the next"


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a model by the contents of its config.json."""
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    kinds = (str(config.get("model_type", "")), str(text.get("model_type", "")))
    family = next((BY_TYPE[kind] for kind in kinds if kind in BY_TYPE), undeclared_family(kinds))
    if family.images is not None and "vision_config" not in config:
        family = replace(family, images=None)
    layers = text.get("layer_types")
    unknown = sorted({*map(str, layers if isinstance(layers, list | tuple) else ())} - {*family.layers})
    if not unknown:
        return family
    why = f"has layers of type {', '.join(unknown)}, which are not known here"
    refused = {**family.refused, **dict.fromkeys((PACKED, SEQUENCE, TENSOR), why)}
    return replace(family, attention=(SDPA, EAGER), refused=refused)


def why_unread(config: Mapping[str, Any]) -> str | None:
    """Return the reason why the images of a model are not read here, by the contents of its config.json; None if they
    are."""
    kind, tower = str(config.get("model_type", "")), config.get("vision_config")
    if "vision_config" not in config:
        return "it has no vision_config"
    if family_of(config).images is None:
        return UNREAD.get(kind, UNCOMPARED)
    tower_type = tower.get("model_type") if isinstance(tower, Mapping) else None
    return UNREAD["pixtral"] if tower_type == "pixtral" else None


NO_IMAGES = "give another model, or write data.image_key=null"  # what to do about unread images


def find_unread_images(name: str, config: Mapping[str, Any]) -> str | None:
    """Return the problem of a run with images and the model `name`, by the contents of its config.json; None if there
    is none."""
    if (why := why_unread(config)) is None:
        return None
    kinds, kind = ", ".join(IMAGE_TYPES), config.get("model_type")
    return f"data.image_key needs a model that reads images ({kinds}), and {name} is a {kind}: {why}"


def heads_can_be_split(heads: int, pairs: int, size: int) -> bool:
    """Return whether `ulysses` can split so many heads of queries, and of keys and values, over `size` ranks."""
    return heads % size == 0 and (pairs % size == 0 or size % pairs == 0)


def undeclared_family(kinds: tuple[str, str]) -> Family:
    """Return what is taken for granted of a model whose types, of the whole and of its text part, are not declared."""
    stateful = any(kind in STATEFUL for kind in kinds)
    return Family(kinds[0], kinds[:1], refused=dict.fromkeys((PACKED, SEQUENCE, TENSOR), CARRIES) if stateful else {})


def why_not_served(family: Family, setting: Callable[[str], Any]) -> str | None:
    """Return the reason why vLLM without a GPU does not serve a model of a family; None if it does."""
    kernels = family.kernels
    names = ("layer_types", "layers_block_type", "hybrid_override_pattern")
    layers = [kind for kind in kernels.no_layers if any(kind in (setting(name) or ()) for name in names)]
    sizes = {name: setting(name) for name in kernels.states if setting(name) is not None}
    if layers:
        return f"has layers of type {layers[0]}, for which vLLM has no kernels there"
    if len({*sizes.values()}) > 1 or {*sizes.values()} - {*kernels.sizes}:
        values = " and ".join(f"{name}={size}" for name, size in sizes.items())
        return f"has {values}, and vLLM's kernels there need the same of {', '.join(map(str, kernels.sizes))} for both"
    return family.why_not(ENGINE)


def num_experts(setting: Callable[[str], Any]) -> tuple[str, int] | None:
    """Return the setting with the number of experts of a layer, and its value; None for a model without experts."""
    settings = ((name, setting(name)) for name in EXPERTS)
    return next(((name, value) for name, value in settings if isinstance(value, int) and value > 0), None)


def bytes_of_routes(setting: Callable[[str], Any]) -> int:
    """Return the most bytes that the routes of a token take, the number of each of its experts in each layer; 0 for a
    model without experts."""
    experts, layers = num_experts(setting), setting("num_hidden_layers")
    per_token = setting("num_experts_per_tok") or setting("num_experts_per_token")
    if experts is None or not isinstance(layers, int) or not isinstance(per_token, int):
        return 0
    return layers * per_token * (1 if experts[1] <= NARROW else 2)


def undeclared_head_setting(head: Head, setting: Callable[[str], Any]) -> tuple[str, Any] | None:
    """Return a setting of a model, and its value, that changes logits in a way that its family does not declare."""
    settings = ((name, setting(name)) for name in HEAD_SETTINGS if name not in head.settings)
    return next(((name, value) for name, value in settings if value not in (None, 1.0)), None)
