"""Mistakes in the pages of runs and sweeps, in sweeps, and in plans."""

from __future__ import annotations

from mutation import Mutation

STATISTICS = ("tests/report/test_statistics.py",)
SWEEP_PAGE = ("tests/report/test_sweep_page.py",)
PAGE = ("tests/report/test_page.py",)
BROWSER = ("tests/report/test_page_in_a_browser.py",)
REPORT = ("tests/report/test_report.py",)
PICTURE = ("tests/report/test_timeline_picture.py",)
SWEEP = ("tests/config/test_sweep.py",)
PLANNER = ("tests/planner/test_planner.py", "-m", "not stack")

PAGES: list[Mutation] = [
    Mutation("two runs have an interval", "report/statistics.py", "LEAST = 5", "LEAST = 2", STATISTICS),
    Mutation(
        "the deviation of a trimmed mean is that of all values",
        "report/statistics.py",
        "values.clip(kept[0], kept[-1]).std(ddof=1)",
        "values.std(ddof=1)",
        STATISTICS,
    ),
    Mutation(
        "the interval of a share goes beyond 1",
        "report/sweep_data.py",
        "found is not None and is_share(name)",
        "found is not None and name is None",
        SWEEP_PAGE,
    ),
    Mutation(
        "runs that differ in their seeds are rows of their own",
        "report/sweep_data.py",
        "if key not in SEEDS",
        "if key",
        SWEEP_PAGE,
    ),
    Mutation(
        "steps that were lost in a kill stay in the curves",
        "report/curves.py",
        "if not names.isdisjoint(seen):",
        "if False:",
        REPORT,
    ),
    Mutation(
        "the seconds of a step are those of its last row",
        "report/curves.py",
        'if name.startswith("timing/") else 0.0',
        'if name == "timing/" else 0.0',
        REPORT,
    ),
    Mutation(
        "an accuracy that is the reward is drawn twice",
        "report/curves.py",
        "drawn(REWARD, found) == drawn(ACCURACY, found)",
        "REWARD is ACCURACY",
        REPORT,
    ),
    Mutation(
        "a policy that learns to write more counts as the beginning of a stream",
        "report/summary.py",
        "left.get(step, 0) > 0 and length < SHORT * after",
        "left.get(step, 0) > 0",
        REPORT,
    ),
    Mutation(
        "the clock of a page counts the hours in which the run was stopped",
        "report/run_data.py",
        'seconds += max(0.0, row["time"] - begin)',
        'seconds += max(0.0, row["time"] - min(before, row["time"]))',
        PAGE,
    ),
    Mutation(
        "the timeline is that of the time in which the run was stopped",
        "report/timeline.py",
        "[-math.inf, *folder.starts(), math.inf]",
        "[-math.inf, math.inf]",
        PICTURE,
    ),
    Mutation(
        "all phases have one colour",
        "report/timeline.py",
        "COLOURS.get(phase, OTHER)",
        "OTHER",
        PICTURE,
    ),
    Mutation(
        "a page lists flags of models that a run lacks",
        "report/run_data.py",
        "if key not in idle",
        "if key",
        PAGE,
    ),
    Mutation(
        "a page shows the password in a URL",
        "report/run_data.py",
        'printable(USER_OF_URL.sub("//...@", text))',
        "printable(text)",
        PAGE,
    ),
    Mutation(
        "a long curve ends before its last point",
        "report/run_data.py",
        "points[(len(points) - 1) % stride :: stride]",
        "points[::stride]",
        PAGE,
    ),
    Mutation(
        "the turns of a model are counted with those of others",
        "report/page/tokens.js",
        "1 + found.filter((each) => each.owner === MODEL).length",
        "1 + found.length",
        BROWSER,
    ),
    Mutation(
        "equal curves are drawn once for each name",
        "report/page/charts.js",
        "? fingerprint(found) : name",
        "? name : name",
        BROWSER,
    ),
    Mutation(
        "the first step was idle while models were loaded",
        "tracking/journal.py",
        "        self.timeline.begin()\n",
        "",
        ("tests/tracking/test_journal.py",),
    ),
    Mutation("a sweep with a failed job succeeds", "sweeps/table.py", "return 1 if failed else 0", "return 0", SWEEP),
    Mutation(
        "jobs beside each other write to one console",
        "sweeps/local_jobs.py",
        'str(Path(job.folder) / "job.log") if parallel > 1 else ""',
        'str(Path(job.folder) / "job.log") if parallel < 1 else ""',
        SWEEP,
    ),
    Mutation(
        "the reason of a job that wrote no status is forgotten",
        "sweeps/local_jobs.py",
        'f"exit code {process.returncode}" if process.returncode else ""',
        '""',
        SWEEP,
    ),
    Mutation(
        "jobs are given up while squeue does not answer",
        "sweeps/slurm_jobs.py",
        'gone = now.get(number, "COMPLETED") in ENDED',
        'gone = now.get(number, "COMPLETED") not in ("RUNNING", "PENDING")',
        SWEEP,
    ),
    Mutation(
        "a job inherits the settings of its sweep",
        "sweeps/launchers.py",
        "settings = [word for word in own if not word.startswith(NOT_FOR_JOBS)]",
        "settings = [*own]",
        SWEEP,
    ),
    Mutation(
        "a sweeper learns the metric of the table, not the one that was named",
        "sweeps/sweepers.py",
        "metrics.get(key, job.value) if key is not None else job.value",
        "job.value",
        ("tests/tasks/test_sweepers.py", "-m", "not stack"),
    ),
    Mutation(
        "ZeRO-1 divides the sums of gradients",
        "planner/memory.py",
        "sums = shares.divided(shares.gradient * found.trained, 2)",
        "sums = shares.divided(shares.gradient * found.trained, 1)",
        PLANNER,
    ),
    Mutation(
        "the other processes of a device take nothing",
        "planner/estimate.py",
        "resting + each.memory.peak - each.memory.resting",
        "each.memory.peak",
        PLANNER,
    ),
    Mutation(
        "a pair of answers is planned as one sequence",
        "planner/estimate.py",
        "return 2 if isinstance(self.run, DPORun | RMRun) else 1",
        "return 1",
        PLANNER,
    ),
    Mutation(
        "a second model is planned beside adapters",
        "planner/estimate.py",
        "same = self.run.ds.lora.rank > 0 and",
        "same = self.run.ds.lora.rank < 0 and",
        PLANNER,
    ),
    Mutation(
        "the rollouts of a run take the room of one step",
        "planner/estimate.py",
        "step * (steps or 1)",
        "step",
        PLANNER,
    ),
    Mutation(
        "the KV cache of a plan has the room that a step takes",
        "planner/memory.py",
        "(share or GPU_MEMORY_ALONE)) - own - step",
        "(share or GPU_MEMORY_ALONE)) - own",
        PLANNER,
    ),
    Mutation(
        "a full disk is no reason not to begin",
        "planner/estimate.py",
        "(needed := sum(terms.values())) > free",
        "(needed := max(terms.values(), default=0)) < 0 < free",
        PLANNER,
    ),
    Mutation(
        "ranks beyond the cores have cores of their own",
        "planner/estimate.py",
        "ranks if self.on_gpu else min(ranks, os.cpu_count() or 1)",
        "ranks",
        PLANNER,
    ),
]
