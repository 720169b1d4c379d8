"""Rules about ranks of a model that share a batch: those that split its tokens, and those that split the matrices."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_suite.config.check.formatting import next_multiple, number_of
from rlhf_suite.config.check.problems import Problem, rule
from rlhf_suite.config.declarations.ds import is_flash
from rlhf_suite.config.declarations.models import TrainedModelConfig
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.declarations.task_groups import TRAINED
from rlhf_suite.config.plan.run_plan import model_sections, num_ranks, ranked_sections

SEQUENCE, TENSOR = "ds.ring_attn_size", "ds.tensor_parallel_size"
WHOLE = f"write {TENSOR}=1"


@rule(tasks=TRAINED)
def ranks_form_groups(run: Run) -> Iterator[Problem]:
    sizes = {SEQUENCE: run.ds.ring_attn_size, TENSOR: run.ds.tensor_parallel_size}
    size = run.ds.ring_attn_size * run.ds.tensor_parallel_size
    named = " x ".join(f"{key}={value}" for key, value in sizes.items() if value > 1)
    for name, section in ranked_sections(run).items():
        if num_ranks(section) % size:
            problem = f"{number_of(num_ranks(section), 'rank')} cannot form groups of {named}"
            fix = f"write {name}.num_gpus_per_node={next_multiple(section.num_gpus_per_node, size)}"
            yield Problem(f"{name}.num_gpus_per_node", problem, fix)


@rule(tasks=TRAINED)
def sequences_split(run: Run) -> Iterator[Problem]:
    """Check that attention knows the borders of packed sequences whose tokens several ranks have."""
    size = run.ds.ring_attn_size
    if size == 1:
        return
    if run.ds.packing_samples is False:
        problem = f"{SEQUENCE}={size} splits the tokens of one row, without padding"
        yield Problem("ds.packing_samples", problem, "write ds.packing_samples=null")
    if is_flash(run.ds.attn_implementation):  # `attention_fits` refuses the others
        problem = f"{run.ds.attn_implementation} does not reach the tokens of other ranks ({SEQUENCE}={size})"
        yield Problem("ds.attn_implementation", problem, "write ds.attn_implementation=varlen")


@rule(tasks=TRAINED)
def matrices_split(run: Run) -> Iterator[Problem]:
    """Check that nothing needs a whole matrix on one rank. Without DeepSpeed there is only one rank."""
    ds = run.ds
    if ds.tensor_parallel_size == 1:
        return
    if ds.lora.rank > 0:
        problem = "LoRA adds its adapters to whole matrices (ds.lora.rank)"
        yield Problem(TENSOR, problem, f"{WHOLE}, or ds.lora.rank=0")
    if ds.ring_attn_size > 1 and ds.ring_attn_mode == "ulysses":
        problem = f"ulysses and {TENSOR} would both split the heads"
        yield Problem("ds.ring_attn_mode", problem, "write ds.ring_attn_mode=gather")
    if ds.zpg > 1:
        yield Problem("ds.zpg", f"a second partition of the weights has not been tried with {TENSOR}", "write ds.zpg=1")
    for name, section in model_sections(run).items():
        if isinstance(section, TrainedModelConfig) and section.optim == "muon":
            problem = f"muon orthogonalises whole matrices, which {TENSOR} splits"
            yield Problem(f"{name}.optim", problem, f"write {name}.optim=adam, or {WHOLE.removeprefix('write ')}")
        if getattr(section, "offload", False):
            problem = f"weights in host memory have not been tried with {TENSOR}"
            yield Problem(f"{name}.offload", problem, f"write {name}.offload=false")
