"""Mistakes in what is found before a run: the trial of the user's code, heads without kernels, labels, servers."""

from __future__ import annotations

from mutation import Mutation

TRIAL_FILE = "tests/config/test_own_code_trial.py"
INSPECTIONS_FILE = "tests/config/test_inspections.py"
HEADS = (INSPECTIONS_FILE, "-k", "test_attention_heads_without_kernels")
RESULTS = ("tests/algo/test_own_results.py",)
COMPAT = ("tests/agents/test_compat.py",)
ROUTES = ("tests/rewards/test_reward_routes.py",)


def trial(test: str) -> tuple[str, ...]:
    """Return the words for one test of trials, since all of them take a while."""
    return (TRIAL_FILE, "-k", test)


EARLY: list[Mutation] = [
    Mutation(
        "the user's code is imported by the run alone",
        "preflight/inspections/__init__.py",
        "return found or distinct(problem for run in asked for problem in own_code_can_be_used(run, folder))",
        "return found",
        trial("test_variables_that_hydra_sets_are_there_in_the_trial"),
    ),
    Mutation(
        "a file that ends the process of the trial counts as one that can be imported",
        "preflight/inspections/own_code.py",
        "        if len(found) < len(pieces):\n",
        "        if False:\n",
        trial("test_a_file_that_ends_the_process_is_found"),
    ),
    Mutation(
        "what a file of the user starts outlives the trial",
        "preflight/inspections/own_code.py",
        "        os.killpg(process.pid, signal.SIGKILL)\n",
        "        os.kill(process.pid, signal.SIGKILL)\n",
        trial("test_nothing_that_a_file_starts_outlives_the_trial"),
    ),
    Mutation(
        "a server of tools that never answers outlives the trial",
        "preflight/inspections/own_code.py",
        "                child.kill()\n",
        "                pass\n",
        trial("test_a_server_that_never_answers_is_a_problem"),
    ),
    Mutation(
        "a file whose import takes long is refused",
        "preflight/inspections/own_code.py",
        "    elif piece.must_end:\n",
        "    else:\n",
        trial("test_a_file_that_takes_long_is_left_to_the_run"),
    ),
    Mutation(
        "user code is run where the machine of the run is not known yet",
        "preflight/inspections/own_code.py",
        "    if folder is None or not is_first_node():\n",
        "    if not is_first_node():\n",
        trial("test_nothing_is_tried_where_the_run_does_not_start"),
    ),
    Mutation(
        "the methods of an environment of TRL are described by the first episode",
        "preflight/trial.py",
        "vars(found).items() if export.form == TRL else ():",
        "():",
        trial("test_a_class_that_no_episode_could_use_is_found"),
    ),
    Mutation(
        "a class that needs arguments is found by the first episode",
        "preflight/trial.py",
        "    except TypeError as error:\n        return str(error)\n",
        "    except TypeError:\n        return None\n",
        trial("test_a_class_that_no_episode_could_use_is_found"),
    ),
    Mutation(
        "MCP servers start with the first episode",
        "preflight/inspections/own_code.py",
        'if kind in ("environment", "tools") and (servers or',
        'if kind in ("environment", "tools") and (',
        trial("test_a_server_of_tools_that_dies_is_shown_with_what_it_said"),
    ),
    Mutation(
        "a file that ends its process while it is imported gets no remedy",
        "python_source.py",
        "    elif isinstance(error, SystemExit):\n",
        "    elif isinstance(error, SystemExit) and False:\n",
        trial("test_a_file_that_ends_the_process_is_found"),
    ),
    Mutation(
        "heads whose size is the default of their family are taken from the width",
        "preflight/inspections/model_files.py",
        "            return int(default[1])\n",
        "            pass\n",
        HEADS,
    ),
    Mutation(
        "heads without kernels are found by the engine",
        "preflight/inspections/models.py",
        "    if sizes and size is not None and size not in sizes:\n",
        "    if False:\n",
        HEADS,
    ),
    Mutation(
        "what an own estimator returns is seen in the first step",
        "preflight/trial.py",
        "    if kind in CALLS:\n",
        "    if False:\n",
        trial("test_what_an_estimator_returns_is_seen_before_the_run"),
    ),
    Mutation(
        "an error with the numbers of a trial refuses a run",
        "preflight/trial.py",
        "        except Exception:\n            return\n",
        "        except ZeroDivisionError:\n            return\n",
        trial("test_what_an_estimator_returns_is_seen_before_the_run"),
    ),
    Mutation(
        "what an own estimator returns is used whatever it is",
        "algo/advantage.py",
        "    if not all(is_like(each, inputs.kl_penalty) for each in numbers):\n",
        "    if False:\n",
        RESULTS,
    ),
    Mutation(
        "a loss of another shape is broadcast",
        "losses/preference.py",
        "    if not is_like(losses, counted):\n        raise preference_loss",
        "    if False:\n        raise preference_loss",
        RESULTS,
    ),
    Mutation(
        "labels that cannot judge a program are found when it is scored",
        "rewards/sources.py",
        'if bad and (config.on_error == "stop" or len(bad) > config.max_error_rate * judged):',
        "if False:",
        ROUTES,
    ),
    Mutation(
        "one bad label ends a run that drops what has no score",
        "rewards/sources.py",
        'if bad and (config.on_error == "stop" or len(bad) > config.max_error_rate * judged):',
        "if bad:",
        ROUTES,
    ),
    Mutation(
        "an environment without a session reads no special tokens and says nothing",
        "agents/openrlhf.py",
        "        if self.session is None:\n",
        "        if False:\n",
        COMPAT,
    ),
    Mutation(
        "the address of a cluster is not tried before the run",
        "preflight/inspections/machine.py",
        '        yield Problem("launch.ray_address", what, fix)\n',
        "        pass\n",
        (INSPECTIONS_FILE, "-k", "test_a_cluster_that_accepts_no_connection"),
    ),
    Mutation(
        "whether a conversation can go on with the chat template is tried when everything has started",
        "tasks/ppo.py",
        "        make_conversations(config, tokenizer, stop_token_ids(plan.models[ACTOR].path, tokenizer))\n",
        "        pass\n",
        ("tests/tasks/test_agents_before_ray.py",),
    ),
]
