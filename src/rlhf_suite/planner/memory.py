"""What a rank or an engine holds in memory, term by term, in bytes.

N: trained parameters of a rank before ZeRO divides them, F: frozen ones, R: ranks that hold the same part of the
matrices (ZeRO divides over them), w: bytes of a weight (2 or 4), a: bytes of a number in the sum of the gradients.
The terms of ZeRO are those of Rajbhandari et al. (arXiv:1910.02054, section 3), plus the buffers of DeepSpeed 0.19,
read in `stage_1_and_2.py`, `stage3.py` and `bf16_optimizer.py` of its folder `runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rlhf_suite.config.declarations.ds import DeepSpeedConfig
from rlhf_suite.config.declarations.rollout import VLLMConfig, most_sequences
from rlhf_suite.config.plan.zero import overlaps_reduction
from rlhf_suite.engines.spec import CPU_BATCHED_TOKENS, CPU_KV_CACHE_MB, GPU_MEMORY_ALONE
from rlhf_suite.models.head import chunk_rows
from rlhf_suite.planner.trace import Parameters, Trace
from rlhf_suite.weight_sync.buckets import BUCKET_BYTES

Bytes = dict[str, int]
MIB, GIB = 1 << 20, 1 << 30
BUCKET = 500_000_000  # elements of DeepSpeed's reduce_bucket_size
GATHERED = 1_000_000_000  # elements: stage3_max_live_parameters
PREFETCHED = 50_000_000  # elements: stage3_prefetch_bucket_size
FOUR_BITS = 0.516  # bytes per weight in nf4: half a byte, 8 bits for each 64 weights, and the scales of those scales
SIZES = {"bf16": 2, "fp32": 4}
# Resident memory of processes that have imported their libraries and hold no model: rough, above the 0.5 to 0.6 GiB of
# a rank and 0.8 GiB of an engine that docs/planner_measured.md has on a CPU.
RANK_PROCESS, DRIVER_PROCESS, ENGINE_PROCESS, RAY_DAEMONS = 800 * MIB, 800 * MIB, 1100 * MIB, 500 * MIB
EPISODE_PROCESS = 600 * MIB  # an episode worker: without what user code and sandboxed sessions take
GPU_PROCESS = 600 * MIB  # of a GPU, for a process that uses it: context, kernels and libraries; not measured here
ENGINE_GRAPHS = 1 * GIB  # CUDA graphs of an engine, unless vllm.enforce_eager
GPU_BATCHED_TOKENS = 8192  # of a step of vLLM, unless a sequence may be longer


@dataclass(frozen=True)
class Memory:
    """What a process holds: `always` and, one after the other, `moments`, on its device, and `host` beside a GPU.

    `away` names what of `always` leaves the device while other processes use it; a process that `keeps` its memory
    does not give back what its moments took.
    """

    always: Bytes
    moments: Bytes = field(default_factory=dict)
    host: Bytes = field(default_factory=dict)
    away: frozenset[str] = frozenset()
    keeps: bool = False

    @property
    def peak(self) -> int:
        """Return the most bytes of the device at one time."""
        return sum(self.always.values()) + max(self.moments.values(), default=0)

    @property
    def resting(self) -> int:
        """Return the bytes of the device while other processes use it. Ranks of models give back the memory of a moment
        after each call; an engine that does not sleep keeps it."""
        if self.keeps:
            return self.peak
        return sum(size for name, size in self.always.items() if name not in self.away)

    def also(self, *, always: Bytes | None = None, moments: Bytes | None = None, host: Bytes | None = None) -> Memory:
        """Return it with further terms."""
        terms = self.always | (always or {}), self.moments | (moments or {}), self.host | (host or {})
        return Memory(*terms, self.away, self.keeps)


@dataclass(frozen=True)
class Shares:
    """How a model is divided: `replicas` is R. A rank of a CPU touches only the part of a buffer that it fills."""

    ds: DeepSpeedConfig
    replicas: int
    on_gpu: bool

    @property
    def stage(self) -> int | None:
        return self.ds.zero_stage

    @property
    def weight(self) -> int:
        return SIZES[self.ds.precision]

    @property
    def gradient(self) -> int:
        return SIZES[self.ds.grad_accum_dtype] if self.ds.param_dtype == "bf16" else 4

    def divide(self, size: float, from_stage: int) -> int:
        """Return the part of `size` that a rank holds, if ZeRO divides it from this stage on."""
        return round(size / (self.replicas if self.stage is not None and self.stage >= from_stage else 1))

    def bucket(self, elements: int, size: int) -> int:
        """Return the bytes of a bucket for so many gradients of `size` bytes each."""
        return (BUCKET if self.on_gpu else min(BUCKET, elements)) * size


def weights(counts: Parameters, shares: Shares, four_bit: bool) -> int:
    """w (N + F), divided by R in ZeRO-3. In 4 bits the matrices of F take 0.516 bytes per weight."""
    packed = counts.quantizable if four_bit else 0
    return shares.divide((counts.total - packed) * shares.weight + packed * FOUR_BITS, 3)


def master_weights(counts: Parameters, shares: Shares) -> int:
    """4 N in fp32 beside bf16 weights, divided by R from ZeRO-1 on. ZeRO-1 and 2 keep a copy of fp32 weights too."""
    own = shares.weight == 2 or shares.stage in (1, 2)
    return shares.divide(4 * counts.trained, 1) if own else 0


def optimizer_moments(counts: Parameters, shares: Shares) -> int:
    """8 N: two moments of AdamW in fp32, divided by R from ZeRO-1 on. Muon has less."""
    return shares.divide(8 * counts.trained, 1)


def gradient_sums(counts: Parameters, shares: Shares) -> int:
    """a N: what the micro-batches of a step add up to, divided by R from ZeRO-2 on. Where the sum is in another
    precision, ZeRO-1 also holds w N until the last backward pass is over."""
    sums = shares.divide(shares.gradient * counts.trained, 2)
    both = shares.stage == 1 and shares.gradient != shares.weight
    return sums + (shares.weight * counts.trained if both else 0)


def backward_buffers(counts: Parameters, shares: Shares) -> int:
    """w times the bucket in which ZeRO-1 to 3 reduce gradients: twice with ds.overlap_comm; and in ZeRO-3 the weights
    that are gathered, which stay up to a billion of them."""
    if shares.stage in (None, 0):
        return 0
    if shares.stage == 1 and shares.weight == 2 and shares.gradient == 4:
        return 0  # its optimiser in bf16 reduces the sums in place
    has_two = overlaps_reduction(shares.ds, "cuda" if shares.on_gpu else "cpu") and shares.stage < 3
    return shares.bucket(counts.trained, shares.weight) * (2 if has_two else 1) + count_gathered(counts, shares)


def count_gathered(counts: Parameters, shares: Shares) -> int:
    """w times the whole weights that a rank has at one time in ZeRO-3, and those on their way to it: they come as one
    flat tensor, and each is copied out of it (`AllGatherCoalescedHandle` of `partition_parameters.py`)."""
    if shares.stage != 3 or shares.replicas == 1:
        return 0
    return shares.weight * sum(min(counts.total, max(limit, counts.largest)) for limit in (GATHERED, PREFETCHED))


def update_buffers(counts: Parameters, shares: Shares) -> int:
    """What an update takes: gradients in fp32 where they were summed in bf16, one flat copy of the part of a rank in
    ZeRO-3 and of the gradients that ranks without ZeRO exchange; and the largest parameter in float64 for the norm."""
    if shares.stage is None:
        return (4 - shares.gradient) * counts.trained
    if shares.stage == 0:
        return shares.bucket(counts.trained, 4) if shares.replicas > 1 else 0
    part = shares.divide(4 * counts.trained, 1) if shares.stage == 3 or shares.gradient == 2 else 0
    return part + 8 * counts.largest


def sum_trained(counts: Parameters, shares: Shares, passes: Trace) -> Memory:
    """Return the terms of a rank of a model that is trained."""
    ds = shares.ds
    state = {
        "master weights": master_weights(counts, shares),
        "optimiser moments": optimizer_moments(counts, shares),
        "gradients": gradient_sums(counts, shares),
    }
    always: Bytes = {"weights": weights(counts, shares, ds.load_in_4bit)}
    host: Bytes = {}
    update = {"update": update_buffers(counts, shares)}
    if ds.adam_offload and shares.on_gpu:
        host = {f"{name} (ds.adam_offload)": size for name, size in (state | update).items()}
        update = {}
        always["buffers of the offload"] = 2 * counts.largest * shares.weight
    else:
        always |= state
    asleep = getattr(ds, "enable_sleep", False) and shares.on_gpu
    if asleep:
        host |= {f"{name} (ds.enable_sleep)": size for name, size in state.items()}
    dequantized = counts.largest * shares.weight if ds.load_in_4bit else 0
    moments = {
        "forward and backward": passes.training + backward_buffers(counts, shares) + dequantized,
    }
    return Memory(always, moments | update, host, frozenset(state) if asleep else frozenset())


def sum_frozen(
    counts: Parameters, shares: Shares, passes: Trace, *, offload: bool, four_bit: bool, name: str
) -> Memory:
    """Return the terms of a rank of a model that only runs forward. Offloaded weights come for all of its forward
    passes."""
    size = weights(counts, shares, four_bit)
    moment = {f"forward of {name}": passes.inference + count_gathered(counts, shares)}
    if offload and shares.on_gpu:
        return Memory(
            {}, {name: taken + size for name, taken in moment.items()}, {f"weights of {name} (offload)": size}
        )
    return Memory({f"weights of {name}": size}, moment)


def logits_of_a_teacher(vocabulary: int) -> int:
    """4 V times the rows that the head processes at a time, for the logits, probabilities and gradients of student and
    teacher: six matrices."""
    return 6 * 4 * vocabulary * chunk_rows(vocabulary)


def sync_buffers(counts: Parameters, backend: str) -> int:
    """What a weight sync takes beside the weights on the device of the first rank: the tensors of a bucket and
    the bucket itself, with nccl another one that is under way, and the largest tensor whole."""
    return {"nccl": 3, "ipc": 2}.get(backend, 0) * BUCKET_BYTES + 4 * counts.largest


@dataclass(frozen=True)
class EngineMemory:
    """One device of an engine: its terms, how many tokens fit into the KV cache of the engine, and what a token takes
    of it on the device."""

    memory: Memory
    kv_tokens: int
    kv_bytes: int


def engine(
    counts: Parameters, config: VLLMConfig, size: int, longest: int, capacity: int | None, share: float | None
) -> EngineMemory:
    """Return what a device of an engine holds, with weights of `size` bytes each.

    On a GPU of `capacity` bytes the KV cache is what the `share` of an engine leaves; None: on a CPU. A token has
    2 x layers x key/value heads x head size numbers (Kwon et al., arXiv:2309.06180, section 3). What a step takes is an
    estimate; vLLM measures it when it starts.
    """
    own = size * counts.total // config.devices
    if capacity is None:
        cache = (config.kv_cache_mb or CPU_KV_CACHE_MB) * MIB
        step = step_of_an_engine(counts, config, size, max(CPU_BATCHED_TOKENS, longest), most_sequences(config, "cpu"))
        terms = {"weights": own, "KV cache": cache}
    else:
        step = step_of_an_engine(counts, config, size, max(GPU_BATCHED_TOKENS, longest), most_sequences(config, "cuda"))
        step += 0 if config.enforce_eager else ENGINE_GRAPHS
        room = int(capacity * (share or GPU_MEMORY_ALONE)) - own - step
        cache = config.kv_cache_mb * MIB if config.kv_cache_mb else max(0, room)
        terms = {"weights": own, "KV cache": cache}
    asleep = frozenset(terms) if getattr(config, "enable_sleep", False) and capacity is not None else frozenset[str]()
    host = {"weights (vllm.enable_sleep)": own} if asleep else {}
    per_token = size * counts.kv_per_token // kv_parts(counts, config)
    memory = Memory(terms, {"a step": step}, host, asleep, keeps=not asleep)
    return EngineMemory(memory, cache // max(1, per_token), per_token)


def kv_parts(counts: Parameters, config: VLLMConfig) -> int:
    """Return among how many devices the keys and values of a token are divided: by layers, and by heads. With more
    devices than heads several hold the same head."""
    return config.pipeline_parallel_size * min(config.tensor_parallel_size, counts.kv_heads)


def step_of_an_engine(counts: Parameters, config: VLLMConfig, size: int, tokens: int, sequences: int) -> int:
    """Twelve hidden states for each token of a step, and three matrices of logits in fp32 for the sampler, with a row
    for each of so many `sequences`."""
    return 12 * size * tokens * counts.hidden // config.tensor_parallel_size + 3 * 4 * sequences * (counts.vocabulary)


def checkpoint(counts: Parameters, *, with_optimizer: bool, average: bool) -> int:
    """Bytes on disk: weights in fp32, two moments, and the moving average of the weights (`train/parts.py`)."""
    return (4 + (8 if with_optimizer else 0) + (4 if average else 0)) * counts.trained
