"""Compare the rules of benchmarks with lm-evaluation-harness on the same answers, row by row.

lm-evaluation-harness is in an environment of its own, whose Python is named: `python -m venv /tmp/lm`,
`/tmp/lm/bin/pip install 'lm_eval[math]'`, then `python benchmarks/beside_lm_eval.py --harness /tmp/lm/bin/python`. The
answers are made up: right ones in many spellings, wrong ones, and ones that only one reading takes. Prints a JSON line
for each reading, with the rows on which the two differ.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
from collections.abc import Callable, Iterator

from common import publish
from rlhf_suite.config.declarations.reward import RuleConfig
from rlhf_suite.registry import reward_rule
from rlhf_suite.rewards.base import Sample, Scored

ROWS = 100
# Runs in the environment of the harness: reads rows from its input, and writes the verdicts of the harness's own tasks.
HARNESS = """
import json, re, sys
from pathlib import Path
import lm_eval.tasks
from lm_eval.api.metrics import exact_match_fn
from lm_eval.filters.extraction import RegexFilter
from importlib.util import module_from_spec, spec_from_file_location
import yaml
tasks = Path(lm_eval.tasks.__file__).parent
def module(path):
    spec = spec_from_file_location(path.stem, path); loaded = module_from_spec(spec); spec.loader.exec_module(loaded)
    return loaded
gsm8k = yaml.load((tasks / "gsm8k/gsm8k.yaml").read_text(), yaml.SafeLoader)
metric = {k: v for k, v in gsm8k["metric_list"][0].items() if k not in ("metric", "aggregation", "higher_is_better")}
filters = {
    entry["name"]: {k: v for k, v in entry["filter"][0].items() if k != "function"} for entry in gsm8k["filter_list"]
}
math, aime = module(tasks / "minerva_math/utils.py"), module(tasks / "aime/utils.py")
rows = json.load(sys.stdin)
def read_gsm8k(row, name):
    answer = RegexFilter(**filters[name]).apply([[row["response"]]], [{}])[0][0]
    return exact_match_fn(predictions=[answer], references=[row["label"]], **metric)["exact_match"]
def read_math(row):
    return math.process_results({"solution": "$\\\\boxed{" + row["label"] + "}$", "answer": row["label"]},
        [row["response"]])["math_verify"]
def read_aime(row):
    return aime.process_results({"Answer": row["label"]}, [row["response"]])["exact_match"]
verdicts = {
    "gsm8k strict": [float(read_gsm8k(row, "strict-match")) for row in rows["gsm8k"]],
    "gsm8k flexible": [float(read_gsm8k(row, "flexible-extract")) for row in rows["gsm8k"]],
    "math500": [float(read_math(row)) for row in rows["math500"]],
    "aime": [float(read_aime(row)) for row in rows["aime"]],
}
from importlib.metadata import version
json.dump({"version": version("lm_eval"), "verdicts": verdicts}, sys.stdout)
"""

Make = Callable[[random.Random], tuple[str, str]]


def main() -> None:
    """Compare and print one JSON line for each reading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", required=True, help="the Python of an environment with lm_eval[math]")
    parser.add_argument("--save", action="store_true", help="add the lines to results/beside_lm_eval.jsonl")
    arguments = parser.parse_args()
    rows = {name: [*made_rows(make)] for name, make in MAKERS.items()}
    command = [arguments.harness, "-c", HARNESS]
    output = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=True).stdout
    theirs = json.loads(output[output.index('{"version"') :])
    ours = own_verdicts(rows)
    for reading, verdicts in theirs["verdicts"].items():
        members = rows[reading.split(" ")[0]]
        pairs = [*zip(members, ours[reading], verdicts, strict=True)]
        different = [row | {"suite": own, "harness": other} for row, own, other in pairs if own != other]
        result = {
            "reading": reading,
            "rows": len(pairs),
            "right": sum(ours[reading]),
            "right_by_harness": sum(verdicts),
            "different": different,
            "lm_eval": theirs["version"],
        }
        publish("beside_lm_eval", result, arguments.save)


def made_rows(make: Make) -> Iterator[dict[str, str]]:
    """Yield rows with a label and a response."""
    generator = random.Random(0)
    for _ in range(ROWS):
        label, response = make(generator)
        yield {"label": label, "response": response}


def own_verdicts(rows: dict[str, list[dict[str, str]]]) -> dict[str, list[float]]:
    """Return the verdicts of the suite's rules."""

    def scores(name: str, rule: str) -> list[Scored]:
        read = reward_rule.load(rule)
        return [read(Sample("", "", row["response"], row["label"], ""), RuleConfig()) for row in rows[name]]

    strict = scores("gsm8k", "gsm8k")
    return {
        "gsm8k strict": [scored.score for scored in strict],
        "gsm8k flexible": [scored.extra["flexible"] for scored in strict],
        "math500": [scored.score for scored in scores("math500", "math")],
        "aime": [scored.score for scored in scores("aime", "math")],
    }


def make_gsm8k(generator: random.Random) -> tuple[str, str]:
    """Return a label of GSM8K and an answer."""
    right = generator.choice([generator.randint(0, 99), generator.randint(1000, 99_999), -generator.randint(1, 50)])
    given = right if generator.random() < 0.7 else right + generator.choice([-1, 1, 10])
    text = generator.choice([f"{given}", f"{given:,}", f"${given:,}", f"{given}.", f"{given}.0", f"{given:,}."])
    forms = ("So it is {}.\n#### {}", "#### {}", "First 3, then #### {}\n#### 7", "The answer is {}",
             "\\boxed{{{}}}", "####{}", "#### {} apples", "I get {}", "#### {}\nThat is 12 more than before.",
             "no number at all")  # fmt: skip
    response = generator.choice(forms)
    return f"A step <<1+1=2>>2.\n#### {right:,}", response.replace("{}", text).replace("{{", "{").replace("}}", "}")


MATHEMATICS = (
    ("\\frac{1}{2}", ("\\frac{1}{2}", "\\dfrac12", "0.5", "1/2", "\\frac{2}{4}", "\\frac{1}{3}", "2")),
    ("3", ("3", "3.0", "x=3", "\\text{3}", "4", "3\\text{ cm}", "-3")),
    ("\\sqrt{2}", ("\\sqrt{2}", "\\sqrt2", "2^{1/2}", "\\sqrt{3}", "1.414")),
    ("(3,\\pi)", ("(3,\\pi)", "(3, \\pi)", "\\left(3,\\pi\\right)", "(\\pi,3)", "3,\\pi")),
    ("x^2+2x+1", ("x^2+2x+1", "(x+1)^2", "x^2+1", "1+2x+x^2")),
    ("10\\%", ("10\\%", "10", "0.1", "11\\%")),
    ("\\{1,2\\}", ("\\{1,2\\}", "\\{2,1\\}", "\\{1,3\\}")),
    ("1,000", ("1,000", "1000", "1000.0", "100")),
)


def make_math(generator: random.Random) -> tuple[str, str]:
    """Return a label of MATH-500 and an answer."""
    label, answers = generator.choice(MATHEMATICS)
    forms = ("So \\boxed{@}.", "First \\boxed{7}. No: \\boxed{@}", "$\\boxed{@}$", "The answer is $@$.")
    return label, generator.choice(forms).replace("@", generator.choice(answers))


def make_aime(generator: random.Random) -> tuple[str, str]:
    """Return a label of AIME and an answer."""
    right = generator.randint(0, 999)
    given = right if generator.random() < 0.7 else generator.randint(0, 999)
    forms = ("So \\boxed{@}.", "$\\boxed{@}$", "We try \\boxed{1}; no, \\boxed{@}", "\\boxed{ @ }", "The answer is $@$",
             "I do not know.")  # fmt: skip
    return str(right), generator.choice(forms).replace("@", str(given))


MAKERS: dict[str, Make] = {"gsm8k": make_gsm8k, "math500": make_math, "aime": make_aime}

if __name__ == "__main__":
    main()
