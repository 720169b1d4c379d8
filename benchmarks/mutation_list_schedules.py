"""Mistakes in when rollouts are made, and in what is said of who was busy."""

from __future__ import annotations

from mutation import Mutation

AHEAD = ("tests/rl/test_schedules.py",)
EVALUATIONS = (*AHEAD, "-k", "evaluat")
DEATHS = ("tests/engines/test_engine_death.py",)
LENGTHS = ("tests/rl/test_trained_lengths.py",)
STREAM = ("tests/rl/test_stream.py",)
TIMELINE = ("tests/tracking/test_timeline.py",)

SCHEDULES = [
    Mutation(
        "a step does not wait for a group that must not get older",
        "rl/stream.py",
        "            if short > len(ready):\n                return None\n",
        "",
        LENGTHS,
    ),
    Mutation(
        "a group may become one step older than the bound",
        "rl/stream.py",
        "if version + bound <= due",
        "if version + bound < due",
        (*STREAM, "-k", "random_schedules"),
    ),
    Mutation(
        "a rollout that is made ahead begins one weight sync too early",
        "rl/schedules.py",
        "self.version < k - self.depth",
        "self.version < k - self.depth - 1",
        AHEAD,
    ),
    Mutation(
        "the policy waits for the sync of its weights",
        "config/plan.py",
        "overlaps_sync=overlaps",
        "overlaps_sync=False",
        (*AHEAD, "-k", "policy_trains_while_its_last"),
    ),
    Mutation(
        "the policy waits for the evaluation of its weights",
        "config/plan.py",
        "overlaps_evaluation=overlaps and not evaluation_decides",
        "overlaps_evaluation=False",
        EVALUATIONS,
    ),
    Mutation(
        "a step trains before the evaluation on which a checkpoint depends",
        "config/plan.py",
        "overlaps_evaluation=overlaps and not evaluation_decides",
        "overlaps_evaluation=overlaps",
        EVALUATIONS,
    ),
    Mutation(
        "the engines get the weights of the next step while they are evaluated",
        "rl/pipeline.py",
        """                self.finish_evaluation()
        self.rollouts""",
        """                pass
        self.rollouts""",
        EVALUATIONS,
    ),
    Mutation(
        "a step trains before the policy is asked for its part of the probe",
        "rl/engine_update.py",
        '        result(queued, f"the policy to be asked for the weights {version}", THREAD)\n',
        "",
        (*AHEAD, "-k", "policy_trains"),
    ),
    Mutation(
        "a checkpoint does not wait for the proof of the weights",
        "train/saving.py",
        "row = metrics()",
        "row = dict()",
        AHEAD,
    ),
    Mutation(
        "the end of a run does not wait for the proof of its last weights",
        "train/loop.py",
        "            self.settled()\n            for model in self.exported:",
        "            for model in self.exported:",
        (*AHEAD, "-k", "does_not_end"),
    ),
    Mutation(
        "a group that begins while weights are synced counts as one of the new weights",
        "rl/stream.py",
        "self.begun[index] = self.version",
        "self.begun[index] = self.step",
        STREAM,
    ),
    Mutation(
        "a step waits for ever for groups of weights that do not arrive",
        "rl/engine_update.py",
        "                self.rollouts.fail(error)\n",
        "",
        (*STREAM, "-k", "do_not_arrive"),
    ),
    Mutation(
        "the overlap is a share of the whole time",
        "tracking/timeline.py",
        "both / least} if least",
        "both / window} if least",
        TIMELINE,
    ),
    Mutation(
        "each of several requests begins an interval of its own",
        "tracking/timeline.py",
        "if self.count != 1:",
        "if self.count < 1:",
        TIMELINE,
    ),
    Mutation(
        "a run that ends does not wait for the rollout that is being made",
        "rl/schedules.py",
        "            self.thread.join(CLOSING_S)\n",
        "            pass\n",
        AHEAD,
    ),
    Mutation(
        "what follows the last step is not in the timeline",
        "rl/pipeline.py",
        "self.journal.timeline.close(self.journal.folder.timeline)",
        "pass",
        AHEAD,
    ),
    Mutation(
        "what is not over when a run ends is not in the timeline",
        "tracking/timeline.py",
        "for each in self.intervals], deque(maxlen=KEPT)",
        "for each in self.intervals if each.end], deque(maxlen=KEPT)",
        TIMELINE,
    ),
    Mutation(
        "an engine that is started again has random weights",
        "engines/pool.py",
        "                self._restore(started)\n",
        "",
        DEATHS,
    ),
    Mutation(
        "an engine that is started again stamps its tokens with version 0",
        "engines/pool.py",
        '"update_weights", manifest)\n\n    def _dead',
        '"update_weights", Manifest(0, manifest.entries, manifest.path))\n\n    def _dead',
        DEATHS,
    ),
    Mutation(
        "an engine is started again once more than it may be",
        "launch/link.py",
        "if count == self.limit:",
        "if count > self.limit:",
        DEATHS,
    ),
    Mutation(
        "requests that a dead engine had get other seeds",
        "launch/link.py",
        "self.start(self.submit([*self.orders.items()]))",
        'replace = __import__("dataclasses").replace\n'
        "            self.start(self.submit([(n, replace(r, seed=r.seed + 1)) for n, r in self.orders.items()]))",
        DEATHS,
    ),
    Mutation(
        "a group of a stream draws other random numbers than in a synchronous run",
        "rl/stream.py",
        "self.builder.sampler.start(index, prompt, stream)",
        "self.builder.sampler.start(index, prompt, index)",
        STREAM,
    ),
    Mutation(
        "a wait for a late group is one for a batch",
        "rl/stream.py",
        'why = "deadline" if len(self.finished) >= size else "batch"',
        'why = "batch"',
        STREAM,
    ),
    Mutation(
        "a continued stream keeps the record of groups that it makes again",
        "rl/stream.py",
        "lines[: self.rejected]",
        "lines",
        STREAM,
    ),
]
