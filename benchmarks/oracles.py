"""How far losses, gradients and estimators are from those of other systems: `python benchmarks/oracles.py` runs
tests/oracles and writes docs/oracles.md, a line for every reference."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "oracles"))

from reference import AGREEMENT, DATA, SUPERVISED  # noqa: E402 - found by the line above

PAGE = ROOT / "docs" / "oracles.md"
HEAD = """# Agreement with other systems

`python benchmarks/oracles.py` writes this page. The references are numbers that other systems computed in float32 on
seeded inputs (`tests/oracles/README.md` gives their versions). Our numbers are computed in float64 on the same
inputs. Each error is the largest absolute difference over all cases of values, gradients and metrics. The rounding of
the reference is about 1e-7. If a line has no number, the test compares in another way (with its own tolerance, or a
bound). If a system differs on purpose, the test says why.

"""


class Users:
    """Which tests compare with which reference; a pytest plugin."""

    def __init__(self) -> None:
        self.of: dict[str, set[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> object:
        AGREEMENT.reference, before = "", dict(AGREEMENT.on_purpose)
        result = yield
        if "notices" in item.name:  # it compares with wrong inputs
            AGREEMENT.on_purpose = before
        if AGREEMENT.reference:
            self.of.setdefault(AGREEMENT.reference, set()).add(item.name.partition("[")[0])
        return result


def main() -> None:
    """Run the comparisons, write the table."""
    users = Users()
    code = pytest.main([str(ROOT / "tests" / "oracles")], plugins=[users])
    if code:
        sys.exit(code)
    lines = ["| reference | largest error | differs on purpose by | test |", "|---|---|---|---|"]
    for name in sorted({**DATA["references"], **SUPERVISED["references"]}):
        columns = [number(errors.get(name)) for errors in (AGREEMENT.errors, AGREEMENT.on_purpose)]
        lines.append(f"| `{name}` | {' | '.join(columns)} | {', '.join(sorted(users.of.get(name, {'not used'})))} |")
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


def number(error: float | None) -> str:
    return "" if error is None else f"{error:.1e}".replace("e-0", "e-")


if __name__ == "__main__":
    main()
