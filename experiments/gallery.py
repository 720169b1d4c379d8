"""Write the pages of the gallery: README.md of this folder and of each example with its curve, and docs/gallery.md.

    python experiments/gallery.py

Nothing is copied by hand: what a recipe is stands in its first lines, what it needs in recipes/plans.jsonl (by
recipes/plan.py), and what it did with a tiny model in recipes/curves.jsonl (by recipes/tiny.py --curves). examples.py
makes the pages of the others.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import examples
from measured import WRITTEN_BY, Curves, Row, Rows, draw, gibibytes, minutes, newest

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
RECIPES = FOLDER / "recipes"
MEANINGS = {
    "train/gpt_loss": "loss per token of the answers",
    "eval/acc": "share of held-out pairs or steps that are judged right",
    "eval/auc": "probability that a good held-out answer ranks above a bad one",
    "eval/loss": "loss on held-out rows",
    "eval/pass1": "share of held-out questions that are answered right",
    "eval/reward": "mean reward of held-out answers, by a tiny reward model",
    "train/reward": "mean reward of the responses, by a tiny reward model",
}
HEAD = """# The gallery

All examples, with what they cost, what they show and what checks them. Every command works as it is printed: in the
repository, or after `pip install` in the folder to which `rlhf-suite gallery` has copied these files as `experiments`
(with `rlhf-suite` in place of `python run.py`).

## Recipes

A recipe is a whole run for a published model (`--config`); the command line wins over the file. **No recipe has run at
its full size, because that needs GPUs.** The measurements are of the same files with `scale=tiny`: a tiny model,
built-in rows and small sizes, on two CPU cores that also had other work. They show that the method works in this suite.
They say nothing about the published model.

The last column is the [plan]({docs}planner.md) for {gpu}, with sequences of `data.max_len` tokens. No run has confirmed
it. If the page of a recipe names a script of OpenRLHF (`examples/scripts`), the recipe has the settings of that script,
without `ds.enable_sleep`. The other recipes have settings that are usual for their method. Recipes do not set `ckpt.*`
and `logger.*`.

```text
rlhf-suite --config experiments/recipes/sft_8b/recipe.yaml
rlhf-suite --config experiments/recipes/sft_8b/recipe.yaml scale=tiny
rlhf-suite plan --gpu a100-80 --config experiments/recipes/sft_8b/recipe.yaml train.micro_batch_size=4
```

| recipe | what it shows | tiny: minutes | tiny: memory | tiny: what changes | planned, in full |
|---|---|---|---|---|---|
"""
CHECKED = """
With every change of the suite, a test passes all recipes through the checks of a run (`tests/planner/test_recipes.py`).
On demand, every recipe runs two steps at tiny scale (`tests/e2e/test_recipes_at_tiny_scale.py`). The curve of a loop
shows the reward of held-out answers, and also the share of right answers, by a rule that the loop does not use.

## Agents, code of your own, notebooks, real data

| example | what it shows | minutes | memory | checked |
|---|---|---|---|---|
"""
OTHERS = """
The minutes are those of all commands of the page, on two CPU cores that also had other work. [Agents]({docs}agents.md)
and [own code]({docs}own_code.md) say more.
"""
# Pages that are written by hand: what they show, minutes, memory, and what checks them.
WRITTEN = {
    "real_data": "Every supervised task on real rows, with intervals on new questions. | | | its page has the figures",
}
PAGE = """# {name}

{what}

```bash
rlhf-suite --config experiments/recipes/{name}/recipe.yaml
```

{planned}

{notes}## At tiny scale

```bash
rlhf-suite --config experiments/recipes/{name}/recipe.yaml scale=tiny
```

{measured}
## Checked

- `tests/planner/test_recipes.py`, in each change: the file passes all checks of a run.
- `tests/e2e/test_recipes_at_tiny_scale.py`, on demand: it trains two steps with tiny models.
{learned}
[All examples](../../README.md)
"""
MEASURED = """`{metric}`, {meaning}: {first:.3f} at {unit} {begin}, {last:.3f} at {unit} {end}.{rule} It took
{minutes} minutes and {memory} of memory for all processes, on two CPU cores with a load average of {load} ({date}).

![{metric} over the steps](curve.png)
"""


@dataclass(frozen=True)
class Recipe:
    """What the first lines of a recipe say of it."""

    name: str
    what: str
    notes: Mapping[str, str]  # by their keys, such as `Script of OpenRLHF`

    @classmethod
    def read(cls, file: Path) -> Recipe:
        """Read `# a sentence`, then `# key: text` with lines of `#   more text`."""
        head = re.match(r"(?:#.*\n)+", file.read_text(encoding="utf-8"))
        lines = re.sub(r"\n#   +", " ", head[0] if head else "").splitlines()
        what, *notes = (line.removeprefix("# ") for line in lines)
        return cls(file.parent.name, what, dict(note.split(": ", 1) for note in notes))


def index(recipes: list[Recipe], curves: Rows, two_steps: Rows, plans: Rows, docs: str) -> str:
    """Return the page of all examples; `docs` is the way from it to docs/."""
    gpus = ", ".join(sorted({str(plan["gpu"]) for plan in plans.values()}))
    lines = [HEAD.format(gpu=gpus, docs=docs).rstrip("\n")]
    for recipe in recipes:
        link = f"[{recipe.name}](../experiments/recipes/{recipe.name}/README.md)"
        tiny = ("", "", "not run")
        if row := two_steps.get(recipe.name):
            tiny = (minutes(row["seconds"]), "", "two steps ran")
        if row := curves.get(recipe.name):
            (_, first), *_, (_, last) = row["points"]
            changes = f"`{row['metric']}` {first:.2f} → {last:.2f}"
            if rule := row.get("rule"):
                changes += f", right: {rule[0][1]:.2f} → {rule[-1][1]:.2f}"
            tiny = (minutes(row["seconds"]), gibibytes(row["peak_mb"]), changes)
        plan = plans.get(recipe.name)
        full = f"{plan['gpus']} GPUs, up to {largest(plan['needs'])}" if plan else ""
        lines.append(f"| {link} | {recipe.what} | {' | '.join(tiny)} | {full} |")
    lines.append(CHECKED.rstrip("\n"))
    lines += others(docs)
    lines.append(OTHERS.format(docs=docs).rstrip("\n"))
    return WRITTEN_BY + "\n" + "\n".join(lines) + "\n"


def others(docs: str) -> Iterator[str]:
    """Yield the line of each example that is not a recipe."""
    for example in examples.EXAMPLES:
        rows = examples.results(example.name)
        taken = minutes(sum(row["seconds"] for row in rows) / len(rows)) if rows else ""
        memory = [row["peak_pss_mb"] for row in rows if "peak_pss_mb" in row]
        link = f"[{example.name}](../experiments/{example.folder}/README.md)"
        pages = [name for line in example.checked for name in re.findall(r"\{docs\}(\w+)\.md", line)]
        tests = [name for line in example.checked for name in re.findall(r"tests/[\w/]+\.py", line)]
        checked = f"[{pages[0]}]({docs}{pages[0]}.md)" if pages else f"`{tests[-1]}`"
        held = gibibytes(max(memory)) if memory else ""
        yield f"| {link} | {example.sentence()} | {taken} | {held} | {checked} |"
    yield from (
        f"| [{Path(folder).name}](../experiments/{folder}/README.md) | {line} |" for folder, line in WRITTEN.items()
    )


def page(recipe: Recipe, curve: Row | None, two_steps: Row | None, plan: Row | None) -> str:
    """Return the page of a recipe."""
    notes = [f"- {key}: {text}\n" for key, text in recipe.notes.items() if key != "Learning measured"]
    learned = recipe.notes.get("Learning measured", "")
    links = re.sub(r"[\w/]+\.md", lambda path: f"[{path[0]}](../../../{path[0]})", learned)
    planned = "There is no plan for the whole recipe: each stage has its own plan, or a package was not installed."
    if plan:
        fits = "fits" if plan["fits"] else "does not fit"
        planned = f"Planned for {plan['gpus']} GPUs ({plan['gpu']}): {plan['needs']}; host: {plan['host']}. "
        planned += f"By the plan it {fits}; it has not run on GPUs."
    measured = "It has not run yet.\n"
    if two_steps:
        measured = f"Two steps ran to their end in {two_steps['seconds']} s on two CPU cores ({two_steps['date']}). "
        measured += "Its curve has not been measured.\n"
    if curve:
        (begin, first), *_, (end, last) = curve["points"]
        measured = MEASURED.format(
            **{key: curve[key] for key in ("metric", "date")},
            meaning=MEANINGS[curve["metric"]],
            **{"begin": begin, "first": first, "end": end, "last": last, "load": curve["load_average"]},
            unit="iteration" if "rule" in curve else "step",
            rule=judged(curve),
            minutes=minutes(curve["seconds"]),
            memory=gibibytes(curve["peak_mb"]),
        )
    return (
        WRITTEN_BY
        + "\n"
        + PAGE.format(
            name=recipe.name,
            what=recipe.what,
            planned=planned,
            notes="".join(notes) + "\n" if notes else "",
            measured=measured,
            learned=f"- Measurements of what this method learns: {links}.\n" if learned else "",
        )
    )


def judged(curve: Row) -> str:
    """Return what a rule said of the held-out answers of a loop."""
    if "rule" not in curve:
        return ""
    shares = " → ".join(f"{share:.3f}" for _, share in curve["rule"])
    return f" The share of right answers among them, by a rule that the loop does not use: {shares}."


def curves_of(curve: Row) -> Curves:
    """Return what the picture of a recipe shows."""
    return {curve["metric"]: curve["points"]} | ({"eval/pass1, by a rule": curve["rule"]} if "rule" in curve else {})


def largest(needs: str) -> str:
    """Return the largest number of GiB in a list of what GPUs hold."""
    return f"{max(map(float, re.findall(r'([0-9.]+) GiB', needs))):.1f} GiB"


def pages() -> dict[Path, str]:
    """Return the text of every page."""
    recipes = [Recipe.read(file) for file in sorted(RECIPES.glob("*/recipe.yaml"))]
    data = (newest(RECIPES / f"{name}.jsonl", "recipe") for name in ("curves", "two_steps", "plans"))
    curves, two_steps, plans = data
    found = {
        recipe.name: page(recipe, curves.get(recipe.name), two_steps.get(recipe.name), plans.get(recipe.name))
        for recipe in recipes
    }
    return {
        FOLDER / "README.md": index(recipes, curves, two_steps, plans, "../docs/"),
        ROOT / "docs" / "gallery.md": index(recipes, curves, two_steps, plans, ""),
        **{RECIPES / name / "README.md": text for name, text in found.items()},
        **{example.path / "README.md": examples.page(example) for example in examples.EXAMPLES},
    }


def main() -> None:
    """Write all pages, and the picture of each curve."""
    for path, text in pages().items():
        path.write_text(text)
    for name, curve in newest(RECIPES / "curves.jsonl", "recipe").items():
        draw(curves_of(curve), RECIPES / name / "curve.png", "iteration" if "rule" in curve else "step")
    for example in examples.EXAMPLES:
        if curves := examples.curve_of(example.name):
            draw(curves, example.path / "curve.png")


if __name__ == "__main__":
    main()
