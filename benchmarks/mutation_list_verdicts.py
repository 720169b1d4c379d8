"""Mistakes in rewards, their processes and user files."""

from __future__ import annotations

from mutation import Mutation

RULES = ("tests/rewards/test_rules.py",)
CODE = ("tests/rewards/test_code_reward.py",)
PROCESS = "tests/rewards/test_reward_process.py"
VERDICTS = [
    Mutation(
        "a row that hangs is a failure again",
        "rewards/reward_process.py",
        "return RowLimit(CLOCK * cpu_s, cpu_s, is_wrong=True)",
        "return RowLimit(CLOCK * cpu_s, cpu_s)",
        (PROCESS, "-k", "limit_of_a_row"),
    ),
    Mutation(
        "a row's limit shrinks with the number of rows without end",
        "rewards/reward_process.py",
        "min(max(count, 1), SHARE)",
        "max(count, 1)",
        (PROCESS, "-k", "limit_of_a_row"),
    ),
    Mutation(
        "a batch is given up although rows have scores",
        "rewards/reward_process.py",
        "self.problem is not None or self.works or self.lost_s",
        "self.problem is not None or self.lost_s",
        (PROCESS, "-k", "given_up"),
    ),
    Mutation(
        "rows beside each other are tried one after the other",
        "rewards/reward_process.py",
        "random.Random(count).shuffle(order)",
        "random.Random(count)",
        (PROCESS, "-k", "beside_each_other"),
    ),
    Mutation(
        "a response that computes for too long is not counted",
        "rewards/reward_process.py",
        "{TIMED_OUT: 1.0} if isinstance(outcome, TimedOut) else",
        "{TIMED_OUT: 0.0} if isinstance(outcome, TimedOut) else",
        (PROCESS, "-k", "does_not_end and pass"),
    ),
    Mutation(
        "each call of an async reward function has a new event loop",
        "rewards/file.py",
        "result = loop.run(wait_for(result))",
        "result = asyncio.run(wait_for(result))",
        (PROCESS, "-k", "clients_and_locks"),
    ),
    Mutation(
        "values are compared absolutely",
        "rewards/mathematics.py",
        "RELATIVE * max(abs(a), abs(b))",
        "RELATIVE * 1e9",
        RULES,
    ),
    Mutation(
        "the base of a number is ignored",
        "rewards/mathematics.py",
        "label[1] == answer[1] and bases[0] == bases[1]",
        "label[1] == answer[1]",
        RULES,
    ),
    Mutation(
        "a point is the set of its numbers",
        "rewards/mathematics.py",
        "not answer.is_ordered and same_items",
        "same_items",
        RULES,
    ),
    Mutation(
        "a unit is no part of an answer",
        "rewards/mathematics.py",
        "if unit and other_unit and unit != other_unit:",
        "if unit and other_unit and unit is None:",
        RULES,
    ),
    Mutation(
        "what is denied is the answer",
        "rewards/answers.py",
        "if DENIED.search(sentence):",
        "if DENIED.fullmatch(sentence):",
        RULES,
    ),
    Mutation(
        "towers of powers are given to sympy",
        "rewards/answers.py",
        "(len(power) > 6 or int(power)",
        "(len(power) > 60 and int(power)",
        RULES,
    ),
    Mutation(
        "a block of output is run as the program",
        "rewards/code.py",
        'for names in (NAMED, ("",)):',
        'for names in ((*NAMED, ""),):',
        CODE,
    ),
    Mutation(
        "output behind the first megabyte is not compared",
        "sandbox/programs.py",
        "program.output_bytes = MAX_PROGRAM_OUTPUT_BYTES",
        "pass",
        (*CODE, "-k", "megabytes"),
    ),
    Mutation(
        "tests may use a helper of the program",
        "rewards/code.py",
        "if HELPER.match(name)]",
        "if HELPER.fullmatch(name * 2)]",
        (*CODE, "-k", "decide"),
    ),
    Mutation(
        "an empty thought has the right form",
        "config/reward.py",
        r"\\s*{NO_TAG}\\S(?:{NO_TAG}.)*".replace("\\\\", "\\"),
        r"(?:{NO_TAG}.)*",
        RULES,
    ),
    Mutation(
        "the same sentence with other numbers is no repetition",
        "rewards/rules.py",
        r're.sub(r"\d+", "0", " "',
        r're.sub(r"\d+", "\\g<0>", " "',
        RULES,
    ),
]
