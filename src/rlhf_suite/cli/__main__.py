"""`python -m rlhf_suite.cli ...` is `python run.py ...` from anywhere; the jobs of a sweep are started so."""

from rlhf_suite.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
