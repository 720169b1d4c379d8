"""The groups of tasks that have the same flags, sections and rules.

A flag, a section and a rule name the tasks that they are for, as in `flag(0, tasks=RL)`, `@rule(tasks=RL)` and
`run.task in RL`.
"""

from __future__ import annotations

SUPERVISED = ("sft", "rm", "dpo", "kto", "prm", "distill")
RL = ("ppo", "serve_train")  # a policy and engines
TRAINED = (*SUPERVISED, *RL)  # they train a model by themselves
LOOPS = ("rejection_sampling", "iterative_dpo", "conditional_sft")
TRAINING = (*TRAINED, *LOOPS)  # a loop trains in its stages
RESUMABLE = (*TRAINING, "generate", "score")

TEXTS = ("sft", "distill")  # they train on whole texts, or on prompts with answers
WITH_ANSWERS = ("sft", "kto", "distill")  # their rows are prompts with answers
WITH_PAIRS = ("rm", "dpo", "kto")  # their rows are, or may be, a better and a worse answer each
PROMPTED = (*RL, "generate", *LOOPS)  # their rows are prompts, which engines answer
SCORED = ("score", "check_reward")  # their rows are responses that there are already
ENCODED = (*TRAINED, "generate", "score", *LOOPS)  # text becomes tokens
RENDERED = (*ENCODED, "chat")
SEEING = ("sft", "rm", "dpo", *RL)  # their models may read images

BY_PREFERENCE = ("dpo", "iterative_dpo")
BY_MODEL = (*RL, "generate", "score", *LOOPS)  # a reward model may score
STANDARDISED = (*RL, "score", *LOOPS, "serve_rm")  # a reward model scores in them, or in a stage of theirs
REWARDED = (*BY_MODEL, "check_reward")
OWN_PRECISION = ("score", "merge_lora", "serve_rm")  # models keep the precision of their checkpoints

SAMPLING = (*RL, "generate")  # they start engines by themselves
PLANNED = (*TRAINED, "generate", "score")  # their models have devices
ON_RAY = (*PLANNED, *LOOPS)  # their processes may be actors of Ray, those of a loop in its stages
JUDGED = (*SAMPLING, "score")  # their rewards come from a rule, a file, servers or a model
SCORED_TEXTS = (*JUDGED, "check_reward")
