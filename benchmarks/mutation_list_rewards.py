"""Mistakes between a response and its reward: rules, files, servers, retries, routes, penalties."""

from __future__ import annotations

from mutation import Mutation

CODE = ("tests/rewards/test_code_reward.py",)
FILE = ("tests/rewards/test_file.py",)
GATHER = ("tests/rl/test_rollout.py",)
REMOTE = ("tests/rewards/test_remote.py",)
RETRY = ("tests/rewards/test_retry.py",)
ROUTES = ("tests/rewards/test_reward_routes.py",)
RULES = ("tests/rewards/test_rules.py",)
SHAPING = ("tests/algo/test_shaping.py",)

REWARDS = [
    Mutation(
        "the steps of a solution are lost where sources are added up",
        "rewards/sources.py",
        "steps += outcome.steps",
        "steps += []",
        ROUTES,
    ),
    Mutation(
        "the weights of several sources are ignored",
        "rewards/sources.py",
        "(weight * outcome.reward, ",
        "(outcome.reward, ",
        ROUTES,
    ),
    Mutation(
        "scores of several sources are added up, not averaged",
        "rewards/sources.py",
        "score / weights, extra, retries, steps)",
        "score, extra, retries, steps)",
        ROUTES,
    ),
    Mutation(
        "rows go to the sources of the other data sources",
        "rewards/sources.py",
        "datasource in self.config.datasets",
        "datasource not in self.config.datasets",
        ROUTES,
    ),
    Mutation(
        "what a source says of its rows goes to the first rows",
        "rewards/sources.py",
        "dict(zip(chosen, found, strict=True))",
        "dict(enumerate(found))",
        ROUTES,
    ),
    Mutation(
        "a source of weight 0 is one that trains",
        "rewards/sources.py",
        "if source.weight > 0 and",
        "if source.weight >= 0 and",
        ROUTES,
    ),
    Mutation(
        "a row's retries are those of its last source",
        "rewards/sources.py",
        "retries = sum(outcome.retries for _, outcome in parts)",
        "retries = parts[-1][1].retries if parts else 0",
        RETRY,
    ),
    Mutation(
        "a label that makes no sense is a wrong answer",
        "rewards/rules.py",
        'return RewardFailure(str(error), "error")',
        "return Scored(0.0, 0.0)",
        RULES,
    ),
    Mutation(
        "an answer may stand anywhere in the response",
        "rewards/rules.py",
        "row.response.strip() == row.label.strip()",
        "row.label.strip() in row.response",
        RULES,
    ),
    Mutation(
        "a format may stand anywhere in the response",
        "rewards/rules.py",
        "re.DOTALL).fullmatch(row.response.strip())",
        "re.DOTALL).search(row.response)",
        RULES,
    ),
    Mutation(
        "the first box is the answer",
        "rewards/answers.py",
        "begin, start, end = full[-1]",
        "begin, start, end = full[0]",
        RULES,
    ),
    Mutation(
        "a reward that is not finite is 0",
        "rewards/reply.py",
        'raise ResultError(f"{name} is {result}")',
        "return 0.0",
        FILE,
    ),
    Mutation(
        "without scores of its own a file's scores are 0",
        "rewards/reply.py",
        'number("score", score[0]) if score else None',
        'number("score", score[0]) if score else 0.0',
        FILE,
    ),
    Mutation(
        "fewer answers than responses are taken for the first ones",
        "rewards/reply.py",
        "if len(values) != count:",
        "if len(values) > count:",
        FILE,
    ),
    Mutation(
        "one retry less than asked for",
        "rewards/retry.py",
        "range(1, num_retries + 1)",
        "range(1, num_retries)",
        RETRY,
    ),
    Mutation(
        "rows that failed get the new outcomes of the first rows",
        "rewards/retry.py",
        "score([rows[i] for i in failed]), strict=True)",
        "score(rows), strict=False)",
        RETRY,
    ),
    Mutation(
        "a wait is not limited",
        "rewards/retry.py",
        "LONGEST_WAIT_S) * random",
        "10**9) * random",
        RETRY,
    ),
    Mutation(
        "a request is tried once less than asked for",
        "rewards/remote.py",
        "range(self.config.num_retries + 1)",
        "range(self.config.num_retries)",
        REMOTE,
    ),
    Mutation(
        "failures of a server add up over the whole run",
        "rewards/remote.py",
        "def works(self) -> None:\n        self.failures = 0",
        "def works(self) -> None:\n        pass",
        REMOTE,
    ),
    Mutation(
        "a server is left out one failure too late",
        "rewards/remote.py",
        "self.failures >= FAILURES_IN_A_ROW",
        "self.failures > FAILURES_IN_A_ROW",
        REMOTE,
    ),
    Mutation(
        "a server is left out for ever",
        "rewards/remote.py",
        "return time.monotonic() < self.out_until",
        "return self.out_until > 0",
        REMOTE,
    ),
    Mutation(
        "all requests go to the first server",
        "rewards/remote.py",
        "(self.all.index(chosen) + 1) % len(self.all)",
        "self.all.index(chosen)",
        REMOTE,
    ),
    Mutation(
        "a server that asks to be left alone for a moment is given up",
        "rewards/remote.py",
        "{408, 425, 429,",
        "{408, 425,",
        REMOTE,
    ),
    Mutation(
        "the token is sent without its scheme",
        "rewards/remote.py",
        'f"Bearer {token}"',
        "token",
        REMOTE,
    ),
    Mutation(
        "the answer to a request that timed out is taken for that of the next",
        "rewards/reward_process.py",
        "except TimeoutError:\n            self._kill()",
        "except TimeoutError:\n            pass",
        ("tests/rewards/test_reward_process.py", "-k", "hang"),
    ),
    Mutation(
        "a file is called row by row",
        "rewards/reward_process.py",
        "if self.takes_batches and len(rows) > 1:",
        "if self.takes_batches and len(rows) > 100:",
        ("tests/rewards/test_reward_process.py", "-k", "batch"),
    ),
    Mutation(
        "a program that passes one test is right",
        "rewards/code.py",
        "right = float(passed == 1.0)",
        "right = float(passed > 0.0)",
        CODE,
    ),
    Mutation(
        "the first program of a response is run",
        "rewards/code.py",
        "found[-1]",
        "found[0]",
        CODE,
    ),
    Mutation(
        "every test of a program has all its seconds",
        "rewards/code.py",
        "left = max(deadline - time.monotonic(), 0.01)",
        "left = config.code_timeout_s",
        CODE,
    ),
    Mutation(
        "the first answer of a response is scored",
        "rewards/gym.py",
        "found[-1] if found",
        "found[0] if found",
        RULES,
    ),
    Mutation(
        "the longest response is that to an empty prompt",
        "rl/shaping.py",
        "self.max_new_tokens(int((trajectory.owner == PROMPT).sum()))",
        "self.max_new_tokens(0)",
        GATHER,
    ),
    Mutation(
        "responses that ended are penalised instead of those cut off",
        "algo/scores.py",
        "torch.where(truncated, penalised, rewards)",
        "torch.where(truncated, rewards, penalised)",
        SHAPING,
    ),
    Mutation(
        "scores that are to be centred are standardised",
        "models/reward_model.py",
        "    return (stats[0], 1.0) if config.normalize_mean_only else stats",
        "    return stats",
        ("tests/tasks/test_score.py",),
    ),
    Mutation(
        "a standardised score keeps its mean",
        "algo/scores.py",
        "(scores - mean) / max(std",
        "scores / max(std",
        SHAPING,
    ),
    Mutation(
        "the overlong penalty begins at the longest response",
        "algo/scores.py",
        "(longest - buffer)).clamp",
        "longest).clamp",
        SHAPING,
    ),
]
