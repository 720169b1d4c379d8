"""Mistakes in what a user of another suite meets: migrate, names of elsewhere, command lines, and sweeps."""

from __future__ import annotations

from mutation import Mutation

BASH = ("tests/migrate/test_random_scripts.py",)
SCRIPTS = ("tests/migrate/test_script.py",)
CONVERT = ("tests/migrate/test_convert.py",)
NAMES = ("tests/config/test_foreign_names.py",)

MIGRATE: list[Mutation] = [
    Mutation(
        "an empty array is an empty argument",
        "migrate/shell_values.py",
        "if not ALL_OF_ARRAY.fullmatch(inside)",
        "if inside is not None",
        BASH,
    ),
    Mutation(
        "an empty variable has no default",
        "migrate/shell_values.py",
        'is_set = value is not None and (not sign.startswith(":") or any(value.texts))',
        "is_set = value is not None",
        BASH,
    ),
    Mutation(
        "quotes within each other have no limit",
        "migrate/shell_words.py",
        "if len(kinds) > MAX_DEPTH:",
        "if len(kinds) > MAX_DEPTH**4:",
        (*SCRIPTS, "-k", "without_end and nested"),
    ),
    Mutation(
        "arithmetic is that of Python and not of a shell",
        "migrate/shell_values.py",
        "if abs(result) >= LARGEST",
        "if abs(result) < 0",
        (*SCRIPTS, "-k", "arithmetic"),
    ),
    Mutation(
        "a variable that a branch sets has that value without a word",
        "migrate/shell.py",
        "after.insert(0, before)",
        "pass",
        (*SCRIPTS, "-k", "condition"),
    ),
    Mutation(
        "what the script exports is forgotten",
        "migrate/shell.py",
        "{**self.exported, **environment}",
        "{**environment}",
        (*SCRIPTS, "-k", "environment"),
    ),
    Mutation(
        "pasting what is printed runs what the script had in quotes",
        "migrate/shell_text.py",
        r"""escaped = re.sub(r'([\\"$`])', r"\\\1", word)""",
        r"""escaped = re.sub(r'([\\"])', r"\\\1", word)""",
        (*BASH, "-k", "pasting"),
    ),
    Mutation(
        "a variable of the environment becomes a folder of that name",
        "migrate/shell_text.py",
        "    if OPEN in word:",
        "    if OPEN not in word:",
        (*BASH, "-k", "stays_one"),
    ),
    Mutation(
        "words behind the value of a flag vanish",
        "migrate/convert.py",
        "for word in values[len(kept) :]:",
        "for word in ():",
        (*BASH, "-k", "passed_over"),
    ),
    Mutation(
        "of two old flags for one the first vanishes without a word",
        "migrate/command.py",
        "if (before := self.flags.get(flag, value)) != value:",
        "if (before := self.flags.get(flag, value)) is None:",
        (*BASH, "-k", "passed_over"),
    ),
    Mutation(
        "a correction loses its lower bound",
        "migrate/handlers.py",
        """f"[{','.join(values)}]")""",
        """f"[{','.join(values[-1:])}]")""",
        CONVERT,
    ),
    Mutation(
        "checkpoints in the folder of the model have none of their own",
        "migrate/combinations.py",
        'new.add("ckpt.path", f"{output}/checkpoints")',
        "pass",
        CONVERT,
    ),
    Mutation(
        "a number below zero is not the value of a flag with dashes",
        "composition/arguments.py",
        'not after.startswith("-") or NUMBER.fullmatch(after) is not None',
        'not after.startswith("-")',
        NAMES,
    ),
    Mutation(
        "a flag with dashes takes the next override as its value",
        "composition/arguments.py",
        """return "=" not in after or (info is not None and known_key(key_of(after)) is None)""",
        """return "=" not in after or info is not None""",
        NAMES,
    ),
    Mutation(
        "settings of submitit keep their names",
        "composition/arguments.py",
        "if own in names else word",
        "if own == name else word",
        NAMES,
    ),
    Mutation(
        "a misspelt preset also hides a task",
        "preflight/jobs.py",
        "each.key in BEFORE_EXPERIMENT or",
        'each.key == "task" or',
        NAMES,
    ),
    Mutation(
        "a value of elsewhere is only a likeness",
        "config/validate.py",
        "if known is not None or spelt is not None:",
        "if spelt is not None:",
        NAMES,
    ),
    Mutation(
        "one of several flags with the same last word is guessed",
        "config/names.py",
        'if several := [name for name in known if name.rpartition(".")[2] == key]:',
        "if several := [name for name in known if name == key]:",
        NAMES,
    ),
    Mutation(
        "a job that a longer sweep adds takes the folder of another",
        "sweeps/launchers.py",
        "number = next(each for each in itertools.count() if each not in taken)",
        "number = own",
        ("tests/config/test_sweep.py", "tests/config/test_folders.py"),
    ),
    Mutation(
        "problems that are told twice stay twice",
        "config/problems.py",
        "return list(dict.fromkeys(problems))",
        "return list(problems)",
        (*NAMES, "tests/config/test_mistakes.py"),
    ),
]
