"""The search for changes that make a run fit: as few as possible, tried together, and each as mild as it can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, resolve
from rlhf_suite.config.rules.check_run import check
from rlhf_suite.errors import UserError
from rlhf_suite.planner.estimate import estimate
from rlhf_suite.planner.needs import Estimate, Target
from rlhf_suite.planner.remedies import Change, Kind, Values, Words, changes, with_values, words_of

Choice = dict[int, int]  # of each change that is made, by its place in the list: the number of its option
Replan = Callable[[Words], Estimate | None]  # None: these words do not make a run that can be planned
PROPOSALS = 3
WIDTH = 8  # combinations of as many changes that are kept for combinations of one more
VARIANTS = 2  # of these with the same changes, but other options
MAX_CHANGES = 8


def proposals(run: Run, given: Iterable[str], target: Target, replan: Replan) -> list[tuple[Words, Estimate]]:
    """Return up to three combinations of as few changes as it takes, each with its estimate; empty if nothing known
    helps. Changes that train something else, or on more devices, are tried only where others do not suffice.

    `given` are the flags of the command line. `replan` plans it with further words, by all that is checked before a
    run: only what it accepts is proposed.
    """
    for kind in Kind:
        search = Search(run, frozenset(given), target, kind)
        accepted = list[tuple[Words, Estimate]]()
        for choice in search.run():
            words = words_of(search.values(choice))
            planned = replan(words)
            if planned is not None and planned.fits and words not in [other for other, _ in accepted]:
                accepted.append((words, planned))
            if len(accepted) == PROPOSALS:
                break
        if accepted:
            return accepted
    return []


class Search:
    """A search by levels: of the combinations of n changes the best are extended by one more."""

    def __init__(self, run: Run, given: frozenset[str], target: Target, kind: Kind) -> None:
        self.base, self.given, self.target = run, given, target
        on_gpu = target.device is not None
        self.changes = [change for change in changes(run, on_gpu) if change.kind <= kind]
        self.known: dict[tuple[tuple[int, int], ...], float] = {}

    def run(self) -> Iterator[Choice]:
        """Yield combinations that fit, of as few changes as one was seen for, those of mild changes first."""
        beam = [Choice()]
        for _ in range(min(MAX_CHANGES, len(self.changes))):
            level = {tuple(sorted(choice.items())): choice for old in beam for choice in self.extend(old)}
            fitting = [choice for choice in level.values() if self.lacking(choice) == 0]
            if fitting:
                softened = {tuple(sorted(choice.items())): choice for choice in map(self.soften, mildest(fitting))}
                yield from sorted(softened.values(), key=cost)
                return
            beam = self.best(level.values())

    def extend(self, choice: Choice) -> Iterator[Choice]:
        """Yield the combinations with one more change. Of a ladder the last option stands for all."""
        for place, change in enumerate(self.changes):
            if place not in choice:
                last = len(change.options) - 1
                for option in (last,) if change.is_ladder else range(last + 1):
                    yield choice | {place: option}

    def best(self, level: Iterable[Choice]) -> list[Choice]:
        """Return the combinations that lack least, of which only a few have the same changes."""
        kept, seen = list[Choice](), dict[frozenset[int], int]()
        for choice in sorted(level, key=lambda choice: (self.lacking(choice), cost(choice))):
            changed = frozenset(choice)
            if self.lacking(choice) < float("inf") and seen.get(changed, 0) < VARIANTS and len(kept) < WIDTH:
                kept.append(choice)
                seen[changed] = seen.get(changed, 0) + 1
        return kept

    def soften(self, choice: Choice) -> Choice:
        """Return the combination without the changes that it fits without, and with the mildest options."""
        for place in sorted(choice, reverse=True):
            without = {other: option for other, option in choice.items() if other != place}
            if self.lacking(without) == 0:
                choice = without
        for place in sorted(choice):
            change = self.changes[place]
            if change.is_ladder:
                while choice[place] > 0 and self.lacking(milder := choice | {place: choice[place] - 1}) == 0:
                    choice = milder
            else:
                options = range(choice[place])
                first = next((option for option in options if self.lacking(choice | {place: option}) == 0), None)
                choice = choice if first is None else choice | {place: first}
        return choice

    def values(self, choice: Choice) -> Values:
        """Return the values of flags that a combination sets."""
        return self.apply(choice)[1]

    def apply(self, choice: Choice) -> tuple[Run, Values]:
        """Return the run with a combination of changes, and the values that differ from its own."""
        run, values = self.base, dict[str, object]()
        for place in sorted(choice):
            change: Change = self.changes[place]
            new = change.options[choice[place]](run)
            run, values = with_values(run, new), {**values, **new}
        return run, {key: value for key, value in values.items() if value != value_of(self.base, key)}

    def lacking(self, choice: Choice) -> float:
        """Return the bytes that a combination lacks; infinite for one that is not a run."""
        key = tuple(sorted(choice.items()))
        if key not in self.known:
            self.known[key] = self.plan(choice)
        return self.known[key]

    def plan(self, choice: Choice) -> float:
        """Plan a combination, and return the bytes that it lacks."""
        run, values = self.apply(choice)
        if check(run, self.given | set(values)) or self.takes_more(run, choice):
            return float("inf")
        try:
            return estimate(run, self.target).lacking
        except UserError:
            return float("inf")

    def takes_more(self, run: Run, choice: Choice) -> bool:
        """Return whether a combination takes more devices, though none of its changes is meant to."""
        if any(self.changes[place].kind == Kind.DEVICES for place in choice):
            return False
        now, before = (resolve(planned, self.target.machine) for planned in (run, self.base))
        return now.placement.num_devices > before.placement.num_devices or ACTOR not in now.models


def value_of(run: Run, key: str) -> object:
    """Return the value of a flag."""
    return attrgetter(key)(run)


def cost(choice: Choice) -> tuple[int, list[int], int]:
    """Return what combinations are ordered by: how many changes, how late they stand in the list, how strong."""
    return len(choice), sorted(choice, reverse=True), sum(choice.values())


def mildest(fitting: list[Choice]) -> list[Choice]:
    """Return one combination for each set of changes, the mildest ones, in their order."""
    first: dict[frozenset[int], Choice] = {}
    for choice in sorted(fitting, key=cost):
        first.setdefault(frozenset(choice), choice)
    return list(first.values())[: 2 * PROPOSALS]
