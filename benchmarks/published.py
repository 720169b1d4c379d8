"""Set-ups of RL that other projects have published, as command lines of this suite: do they fit by the plan, and what
does the planner propose for those that do not?

Each has the model, the GPUs and the sharing of GPUs that were published; what else it takes to fit is for the planner
to find. Models are a `config.json` alone.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_suite.api.plans import Devices, only_run, plan_again, target_of
from rlhf_suite.composition.arguments import parse
from rlhf_suite.planner.estimate import estimate
from rlhf_suite.planner.needs import gib
from rlhf_suite.planner.search import proposals
from rlhf_suite.preflight.jobs import preflight


def qwen2(hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> dict[str, Any]:
    """Return the config.json of a model of Qwen2's kind."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152_064,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "tie_word_embeddings": False,
    }


# Of Qwen2.5-7B, Qwen2.5-32B, Qwen2-72B and Llama-3-8B.
CONFIGS = {
    "7b": qwen2(3584, 28, 28, 4, 18_944),
    "32b": qwen2(5120, 64, 40, 8, 27_648),
    "70b": qwen2(8192, 80, 64, 8, 29_568),
    "8b": qwen2(4096, 32, 32, 8, 14_336)
    | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256},
}
DATA = ("data.prompt_dataset=builtin:arithmetic", "launch.device=cuda", "train.colocate_all=true", "data.max_len=2048")
README = (
    *("reward.model_name_or_path={model}", "algo.kl.init_coef=0.01", "correction=tis"),
    *(
        "vllm.enable_sleep=true",
        "ds.enable_sleep=true",
        "vllm.num_engines=4",
        "vllm.tensor_parallel_size=2",
        "vllm.gpu_memory_utilization=0.5",
    ),
    *("critic.num_gpus_per_node=8", "reward.num_gpus_per_node=8", "train.batch_size=128", "rollout.batch_size=1024"),
    *("actor.gradient_checkpointing_enable=true", "critic.gradient_checkpointing_enable=true", "ds.param_dtype=bf16"),
)


@dataclass(frozen=True)
class SetUp:
    """A published set-up: who has published it for which GPUs, and the words of the run here."""

    name: str
    source: str
    model: str
    gpu: str
    nodes: int
    gpus: int  # of a node
    words: tuple[str, ...]

    def line(self, folder: Path) -> list[str]:
        """Return the words of the run, whose model is in `folder`."""
        model = folder / self.model
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(CONFIGS[self.model]))
        placed = [f"{name}.num_gpus_per_node={self.gpus}" for name in ("actor", "ref")]
        placed += [f"{name}.num_nodes={self.nodes}" for name in ("actor", "ref")] if self.nodes > 1 else []
        own = [word.format(model=model) for word in self.words]
        return ["task=ppo", f"actor.model_name_or_path={model}", *DATA, *placed, *own]


def grpo(engines: int, stage: int, *words: str) -> tuple[str, ...]:
    """Return the words of a GRPO run with an engine on each GPU."""
    return (
        "experiment=grpo",
        "reward.rule=math",
        "data.label_key=answer",
        f"vllm.num_engines={engines}",
        f"ds.zero_stage={stage}",
        *words,
    )


VERL, OPENRLHF = "verl", "OpenRLHF's README"
SETUPS = (
    SetUp("7B GRPO, 2 x H800, offload", VERL, "7b", "h800", 1, 2, grpo(2, 3)),
    SetUp("32B GRPO, 8 x H20", VERL, "32b", "h20", 1, 8, grpo(8, 3)),
    SetUp("32B GRPO with LoRA, 4 x H100", VERL, "32b", "h100-80", 1, 4, grpo(4, 3, "ds.lora.rank=32")),
    SetUp("70B GRPO, 32 x H800", VERL, "70b", "h800", 4, 8, grpo(32, 3)),
    SetUp("7B GRPO, 8 x H100, ZeRO-2", VERL, "7b", "h100-80", 1, 8, grpo(8, 2)),
    SetUp(
        "8B PPO, hybrid engine, 8 x H100, ZeRO-3, both sleep",
        OPENRLHF,
        "8b",
        "h100-80",
        1,
        8,
        (*README, "ds.zero_stage=3"),
    ),
)


def compare_plans(setup: SetUp, folder: Path) -> dict[str, Any]:
    """Return the plan of a set-up as it is, and of the first proposal if that does not fit."""
    line = parse(setup.line(folder))
    target = target_of(Devices(gpu=setup.gpu))
    checked = preflight(line)
    run = only_run(checked)
    assert run is not None, checked.problems
    plan = estimate(run, target)

    replan = partial(plan_again, line, target)
    proposed = [((), plan)] if plan.lacking == 0 else proposals(run, checked.given, target, replan)
    words, after = proposed[0] if proposed else (None, None)
    return {
        "setup": setup.name,
        "source": setup.source,
        "before": gib(plan.peak),
        "usable": gib(target.usable),
        "changes": None if words is None else list(words),
        "after": None if after is None else gib(after.peak),
        "sequences": None if after is None or after.engine is None else after.engine.kv_tokens // after.longest,
    }


def table_of(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows as a table of a page."""
    lines = [
        "| set-up | published by | plan as it is | first proposal | plan with it | whole sequences in the KV cache |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        changes = " ".join(f"`{word}`" for word in row["changes"]) if row["changes"] else "fits as it is"
        changes = "none" if row["changes"] is None else changes
        cells = (row["setup"], row["source"], f"{row['before']} of {row['usable']}", changes, row["after"])
        lines.append(f"| {' | '.join(str(cell) for cell in cells)} | {row['sequences']} |")
    return lines


def main() -> None:
    """Plan each set-up, and print one JSON line and the table; `--write` puts it into docs/planner_measured.md."""
    from common import ROOT, publish, scratch, write_section

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="set-ups with these words in their names")
    parser.add_argument("--save", action="store_true", help="add the line to results/published.jsonl")
    parser.add_argument("--write", action="store_true", help="write the page's section")
    arguments = parser.parse_args()
    with scratch() as folder:
        chosen = [setup for setup in SETUPS if arguments.only in setup.name]
        rows = [compare_plans(setup, folder) for setup in chosen]
    publish("published", {"setups": rows}, arguments.save)
    heading = "## Against published set-ups"
    intro = (
        "`python benchmarks/published.py --save --write` writes this section. It plans runs that other projects",
        "have published: with their model, GPUs and sharing of GPUs, the defaults of this suite, and 2048 tokens.",
        "It compares only the memory: by the plan, such a set-up must fit with few changes.",
    )
    lines = [heading, "", *intro, "", *table_of(rows)]
    print("\n".join(lines))
    if arguments.write:
        write_section(ROOT / "docs" / "planner_measured.md", heading, "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
