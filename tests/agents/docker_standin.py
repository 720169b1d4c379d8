"""A stand-in for the program `docker`, which the machines of the tests do not have: it reads the words of `docker run`
strictly, and runs the command without a container.

Only the flags that the suite uses are known, with the meaning that the manual of docker gives them. Each call is a line
of the file $STANDIN_CALLS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(os.environ.get("STANDIN_CALLS", "calls.jsonl"))
ALONE = {"--rm", "--init", "--interactive"}
WITH_VALUE = {
    *("--name", "--network", "--memory", "--memory-swap", "--pids-limit", "--cap-drop", "--security-opt", "--user"),
    *("--volume", "--workdir", "--env", "--entrypoint"),
}
IMAGE = "agents:1"


def main(words: list[str]) -> int:
    with HERE.open("a") as calls:
        calls.write(json.dumps(words) + "\n")
    if words[0] == "version":
        print("27.3.1")
        return 0
    if words[:2] == ["image", "inspect"]:
        if words[2] != IMAGE:
            sys.stderr.write(f"Error response from daemon: No such image: {words[2]}\n")
        return int(words[2] != IMAGE)
    if words[0] == "rm":
        return 0
    assert words[0] == "run"
    flags, rest = {name: [] for name in WITH_VALUE}, words[1:]
    while rest[0].startswith("-"):
        name = rest.pop(0)
        assert name in ALONE | WITH_VALUE, f"unknown flag: {name}"
        if name in WITH_VALUE:
            flags[name].append(rest.pop(0))
    image, *command = rest
    assert image == IMAGE
    inside = {"PATH": "/usr/local/bin:/usr/bin:/bin"}  # as the image says
    for variable in flags["--env"]:
        name, is_given, value = variable.partition("=")
        inside[name] = value if is_given else os.environ[name]
    words = [*flags["--entrypoint"], *command]
    return subprocess.run(words, env=inside, cwd=flags["--workdir"][-1], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
