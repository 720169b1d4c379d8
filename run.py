import importlib.util
import sys

if importlib.util.find_spec("rlhf_suite") is None:
    sys.stderr.write(
        f"rlhf_suite is not installed for {sys.executable}.\n"
        "    fix: source .venv/bin/activate; python3 noxfile.py -s install makes this environment\n"
    )
    sys.exit(2)

from rlhf_suite.cli.__main__ import command

if __name__ == "__main__":
    command()
