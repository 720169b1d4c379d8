"""`python -m rlhf_suite.cli ...` is `python run.py ...` and `rlhf-suite ...`; the jobs of a sweep are started so."""

from rlhf_suite.cli import main


def command() -> int:
    """Do what the command line says, and return the exit code of this process, which nothing holds afterwards."""
    code = main()
    if code:
        from rlhf_suite.launch.stop import leave

        leave(code)
    return code


if __name__ == "__main__":
    raise SystemExit(command())
