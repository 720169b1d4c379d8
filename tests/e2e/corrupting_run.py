"""`run.py` with a policy that, at its third sync, changes one byte of one tensor after its digest was taken."""

from __future__ import annotations

from pathlib import Path

from rlhf_suite.cli import main
from rlhf_suite.rl import actors
from rlhf_suite.rl.roles import PolicyRole
from rlhf_suite.weight_sync.digests import WHOLE, Manifest

TENSOR = "model.layers.1.mlp.gate_proj.weight"


class Corrupting(PolicyRole):
    """The policy, with memory that fails once."""

    def publish(self, version: int, part: str = WHOLE) -> Manifest | None:
        manifest = super().publish(version, part)
        assert manifest is not None and manifest.path is not None
        if version == 2:
            entry = next(entry for entry in manifest.entries if entry.name == TENSOR)
            with Path(manifest.path).open("r+b") as file:
                file.seek(entry.offset + entry.nbytes // 2)
                before = file.read(1)[0]
                file.seek(-1, 1)
                file.write(bytes([before ^ 1]))
        return manifest


if __name__ == "__main__":
    *others, (handle, _) = actors.start_actors.__defaults__ or ()
    actors.start_actors.__defaults__ = (*others, (handle, Corrupting))
    raise SystemExit(main())
