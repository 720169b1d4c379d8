"""`task=generate` against vLLM alone: CPU seconds of a further token, so that start-up does not count.

Each side answers the same prompts twice, few and many; the difference in CPU seconds of all processes over that in
tokens is what a token costs. vLLM alone is `LLM.generate` with the same engine arguments, seeds and prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from common import ROOT, publish, scratch, watch

NEW_TOKENS, MAX_LEN, SEQUENCES = 128, 256, 256
ALONE = f"""
import json, sys
from pathlib import Path
from vllm import LLM, SamplingParams
from rlhf_suite.models.load import load_tokenizer
from rlhf_suite.config.declarations.data import DataConfig
model, prompts, output = sys.argv[1:]
tokenizer = load_tokenizer(model, DataConfig.of("ppo"))
rows = [json.loads(line)["input"] for line in Path(prompts).read_text().splitlines()]
llm = LLM(model=model, dtype="float32", max_model_len={MAX_LEN}, max_num_seqs={SEQUENCES}, enforce_eager=True,
          generation_config="vllm", skip_tokenizer_init=True, enable_prefix_caching=False, block_size=32,
          kv_cache_memory_bytes=512 << 20, enable_chunked_prefill=False, max_num_batched_tokens=4096)
ids = tokenizer(rows, add_special_tokens=False)["input_ids"]
params = [SamplingParams(max_tokens={NEW_TOKENS}, temperature=1.0, seed=i, detokenize=False,
                         stop_token_ids=[tokenizer.eos_token_id]) for i in range(len(ids))]
done = llm.generate([{{"prompt_token_ids": each}} for each in ids], params, use_tqdm=False)
tokens = sum(len(each.outputs[0].token_ids) for each in done)
Path(output).write_text(json.dumps({{"tokens": tokens}}))
"""


def ours(folder: Path, model: str, prompts: Path) -> tuple[float, float]:
    """(CPU seconds, tokens) of `task=generate`."""
    words = [
        "task=generate",
        f"actor.model_name_or_path={model}",
        f"data.prompt_dataset={prompts}",
        f"data.max_len={MAX_LEN}",
        f"rollout.max_new_tokens={NEW_TOKENS}",
        f"vllm.max_num_seqs={SEQUENCES}",
        "vllm.kv_cache_mb=512",
        "ds.param_dtype=fp32",
        f"hydra.run.dir={folder}",
    ]
    usage = watch([sys.executable, str(ROOT / "run.py"), *words], folder.with_suffix(".log"))
    status = json.loads((folder / "status.json").read_text())
    return usage.cpu_between(usage.started, usage.ended), status["metrics"]["tokens"]


def alone(folder: Path, model: str, prompts: Path) -> tuple[float, float]:
    """(CPU seconds, tokens) of vLLM's own `LLM.generate`."""
    from rlhf_suite.engines.start import engine_env

    output = folder.with_suffix(".json")
    variables = [f"{name}={value}" for name, value in engine_env("cpu").items()]
    command = ["env", *variables, sys.executable, "-c", ALONE, model, str(prompts), str(output)]
    usage = watch(command, folder.with_suffix(".log"))
    return usage.cpu_between(usage.started, usage.ended), json.loads(output.read_text())["tokens"]


def main() -> None:
    """Measure and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", nargs=2, type=int, default=[256, 768], metavar=("FEW", "MANY"))
    parser.add_argument("--save", action="store_true", help="add the line to results/generate.jsonl")
    arguments = parser.parse_args()
    from rlhf_suite.models.load import model_folder

    model = model_folder("builtin:small", "--model")
    result: dict[str, float] = {}
    with scratch() as folder:
        for name, side in (("ours", ours), ("vllm", alone)):
            costs = []
            for count in arguments.prompts:
                prompts = folder / f"{count}.jsonl"
                prompts.write_text("".join(json.dumps({"input": f"row {n:06d} of many"}) + "\n" for n in range(count)))
                costs.append(side(folder / f"{name}_{count}", model, prompts))
            (few_s, few), (many_s, many) = costs
            result[f"{name}_tokens_per_cpu_s"] = round((many - few) / (many_s - few_s), 1)
            result[f"{name}_cpu_s"] = round(many_s, 1)
    result["overhead"] = round(result["vllm_tokens_per_cpu_s"] / result["ours_tokens_per_cpu_s"] - 1, 4)
    publish("generate", result, arguments.save)


if __name__ == "__main__":
    main()
