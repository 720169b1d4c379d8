"""Compare the rules of benchmarks with lm-evaluation-harness on the same answers, row by row.

lm-evaluation-harness is in an environment of its own, whose Python is named: `python -m venv /tmp/lm`,
`/tmp/lm/bin/pip install 'lm_eval[math,ifeval]'`, then `python benchmarks/beside_lm_eval.py --harness
/tmp/lm/bin/python`. For ifeval nltk's data punkt_tab are needed, and here the extra `ifeval` of the suite. The answers
are made up: right ones in many spellings, wrong ones, and ones that only one reading takes. Prints a JSON line for each
reading, with the rows on which the two differ.
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
ifeval = module(tasks / "ifeval/utils.py")
def read_ifeval(row):
    return ifeval.process_results({"key": 0, "prompt": "", **json.loads(row["label"])}, [row["response"]])
read = [read_ifeval(row) for row in rows["ifeval"]]
for name in ("prompt_level_strict_acc", "prompt_level_loose_acc"):
    verdicts["ifeval " + name] = [float(each[name]) for each in read]
for name in ("inst_level_strict_acc", "inst_level_loose_acc"):
    verdicts["ifeval " + name] = [float(sum(each[name])) for each in read]
from importlib.metadata import version
json.dump({"version": version("lm_eval"), "verdicts": verdicts}, sys.stdout)
"""

Make = Callable[[random.Random], tuple[str, str]]


def main() -> None:
    """Compare and print one JSON line for each reading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--harness", required=True, help="the Python of an environment with lm_eval[math]")
    parser.add_argument("--kinds", nargs="+", choices=[*MAKERS], default=[*MAKERS], help="of answers; all by default")
    parser.add_argument("--save", action="store_true", help="add the lines to results/beside_lm_eval.jsonl")
    arguments = parser.parse_args()
    rows = {name: [*made_rows(make)] if name in arguments.kinds else [] for name, make in MAKERS.items()}
    command = [arguments.harness, "-c", HARNESS]
    done = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the harness has failed:\n{done.stderr[-2000:]}")
    output = done.stdout
    theirs = json.loads(output[output.index('{"version"') :])
    ours = own_verdicts(rows)
    for reading, verdicts in theirs["verdicts"].items():
        members = rows[reading.split(" ")[0]]
        if not members:
            continue
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
        **own_verdicts_of_instructions(scores("ifeval", "ifeval")),
    }


def own_verdicts_of_instructions(scored: list[Scored]) -> dict[str, list[float]]:
    """Return the verdicts of the rule `ifeval` on prompts, and how many instructions each response follows."""
    names = {"loose": "prompt_level_loose", "followed": "inst_level_strict", "followed_loose": "inst_level_loose"}
    verdicts = {f"ifeval {theirs}_acc": [each.extra[own] for each in scored] for own, theirs in names.items()}
    return {"ifeval prompt_level_strict_acc": [each.score for each in scored], **verdicts}


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
             "So \\boxed{m+n=@}.", "\\boxed{\\text{@}}", "The answer is @.", "**@**", "I do not know.")  # fmt: skip
    spelling = generator.choice([f"{given}", f"{given}", f"{given:03d}", f"{given}."])
    return str(right), generator.choice(forms).replace("@", spelling)


# Arguments of each kind of instruction of IFEval, and parts of responses that may follow it.
INSTRUCTIONS: tuple[tuple[str, dict[str, object], tuple[str, ...]], ...] = (
    ("keywords:existence", {"keywords": ["river", "stone"]}, ("The River and a stone.", "A river.")),
    ("keywords:frequency", {"keyword": "tea", "frequency": 2, "relation": "at least"}, ("tea, Tea", "steam", "tea")),
    ("keywords:frequency", {"keyword": "the", "frequency": 3, "relation": "less than"}, ("The other", "the the the")),
    ("keywords:forbidden_words", {"forbidden_words": ["her", "him"]}, ("there", "Her book", "himself")),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 4, "let_relation": "less than"}, ("eEe", "eeee")),
    ("language:response_language", {"language": "de"}, ("Das ist ein deutscher Satz, und noch einer.", "It is not.")),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"},
     ("I met Dr. No. He is 3.5 feet tall. Really?", "One. Two!", "It costs $3.50, e.g. here. So? No. Yes.")),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2},
     ("a\n***\nb", "***\na\n***\nb\n***", "a ***\n*** b")),
    ("length_constraints:number_words", {"num_words": 4, "relation": "less than"}, ("it's so", "one two three four")),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"},
     ("a\n\n\"well, b", "a\n\nWell!", "a\n\n\n\nwell", "well")),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ("[a] and [b c]", "[a", "[a][]")),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ("x\nP.S. y", "p. s. y", "PS y")),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, ("P.P.S so", "P.S. so", "p. p. s")),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ("* a\n* b", "- a\n* b", "* a\n** b", "*a*\n- b")),
    ("detectable_format:constrained_response", {},
     ("My answer is maybe.", "my answer is no.", "So: My answer is no. OK")),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2},
     ("*a* **b**", "** **", "*a* *b*", "**a**")),
    ("detectable_format:multiple_sections", {"section_spliter": "SECTION", "num_sections": 2},
     ("SECTION 1 a\nSECTION 2 b", "Section 1 Section 2", "SECTION 1")),
    ("detectable_format:json_format", {}, ('{"a": [1]}', "```json\n[1]\n```", "{'a': 1}", "```\n3```")),
    ("detectable_format:title", {}, ("<<A title>>\nx", "<< >>", "<a>")),
    ("combination:two_responses", {}, ("a\n******\nb", "a ****** a", "****** a ****** b ******")),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write it."}, ("write it. It", "It. Write it.")),
    ("startend:end_checker", {"end_phrase": "Is it so?"}, ('x "is it so?"', "Is it so? No", "Is it so?")),
    ("startend:quotation", {}, ('"all of it"', '"', '"half')),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"},
     ("A NASA plan", "IT'S SO", "none", "U.S. IS")),
    ("change_case:english_capital", {},
     ("THIS IS ALL IN ENGLISH AND LARGE.", "THIS IS Not", "DAS IST EIN GROSSER DEUTSCHER SATZ.")),
    ("change_case:english_lowercase", {}, ("this is all in english and small.", "This", "123 456")),
    ("punctuation:no_comma", {}, ("a; b", "a, b")),
)  # fmt: skip


def make_instructions(generator: random.Random) -> tuple[str, str]:
    """Return the instructions of a prompt of IFEval and an answer, which begins or ends with other lines at times. Rows
    have all arguments, most of them null."""
    chosen = generator.sample(INSTRUCTIONS, generator.choice([1, 1, 1, 2, 3]))
    arguments = [{"num_words": None, "language": None, **given} for _, given, _ in chosen]
    label = {"instruction_id_list": [kind for kind, _, _ in chosen], "kwargs": arguments}
    text = generator.choice(["\n", " "]).join(generator.choice(parts) for _, _, parts in chosen)
    forms = ("@", "@", "@", "Sure, here it is:\n@", "@\nIs there more, or less?", "Yes:\n@\nThat is all.", "*@*", " ")
    return json.dumps(label), generator.choice(forms).replace("@", text)


MAKERS: dict[str, Make] = {
    "gsm8k": make_gsm8k,
    "math500": make_math,
    "aime": make_aime,
    "ifeval": make_instructions,
}

if __name__ == "__main__":
    main()
