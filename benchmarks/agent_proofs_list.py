"""What agents and asynchronous training promise: for each promise its tests, figures, mistakes and pages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Saved:
    """A text with fields of the newest line of benchmarks/results/<file>.jsonl that has all of them."""

    file: str
    text: str


@dataclass(frozen=True)
class Cell:
    """A text with columns of a row of docs/<page>: the first that has `row` in its first cell, in the table whose
    first columns are `table`."""

    page: str
    table: str
    row: str
    text: str


@dataclass(frozen=True)
class Count:
    """A text with two numbers: the rows of such a table whose `column` begins with `begins`, and all its rows."""

    page: str
    table: str
    column: str
    begins: str
    text: str


Figure = Saved | Cell | Count


@dataclass(frozen=True)
class Row:
    """A promise, and the tests that prove it: `file` or `file::function`."""

    promise: str
    tests: tuple[str, ...]
    figures: tuple[Figure, ...] = ()
    mistakes: tuple[str, ...] = ()  # titles of mutations
    pages: tuple[str, ...] = ()  # files of docs/ that show more


SCHEDULES, STREAM = "tests/rl/test_schedules.py", "tests/rl/test_stream.py"
BESIDE = "tests/rl/test_evaluations_beside_steps.py"
SLOTS = "tests/rl/test_slots.py"
SESSION, ENDPOINT = "tests/agents/test_agent_session.py", "tests/agents/test_endpoint.py"
FORKS, ADVANTAGE = "tests/rl/test_forked_episodes.py", "tests/algo/test_advantage.py"
EPISODES = "tests/algo/test_advantage_of_episodes.py"
KILLED = "{kills} kills at random instants in {runs} runs, {compared} files compared, different: {different}"
RIGHT, CALLS = "{right, start} -> {right, end}", "{calls, start} -> {calls, end}"
OVERLAP = (
    "{tools[stream_to_synchronous]} x the steps per second of a synchronous run where tools sleep, "
    "overlap {tools[stream][overlap]}"
)
COMPUTING = (
    "{compute[stream_to_synchronous]} x where everything computes, {compute[ahead_to_synchronous]} x made ahead, "
    "overlap {compute[stream][overlap]}"
)
ALONE = (
    "{job[sessions]} sessions at a time: for {job[tools_alone]:.1%} of the steps a run waited for tools alone, for "
    "{job[tools]:.1%} a tool worked"
)

DRIVER = (
    "microseconds of a CPU per token at {responses:,} responses: {steps[group_norm][us_per_token]} (group_norm), "
    "{steps[gae][us_per_token]} (gae)"
)

ROWS = (
    Row(
        "Rollouts that are made 0 steps ahead, and a stream without staleness, are a synchronous run: the same "
        "samples and the same weights, bit for bit, with and without dynamic filtering.",
        (
            f"{SCHEDULES}::test_rollouts_made_0_steps_ahead_are_those_of_a_synchronous_run",
            f"{STREAM}::test_a_stream_without_staleness_is_a_synchronous_run",
            "tests/rl/test_rounds_of_rollouts.py::test_each_round_of_filtering_draws_other_samples",
        ),
        mistakes=("a group draws by its own number, not by that of its round",),
    ),
    Row(
        "Rollouts that are made ahead have the same numbers in each run, also after kills.",
        (
            f"{SCHEDULES}::test_rollout_k_is_written_by_version_k_less_the_depth_whole",
            f"{SCHEDULES}::test_a_run_that_was_stopped_continues_with_the_rollouts_that_were_made",
        ),
        (Cell("kills.md", "run", "rollouts made ahead", KILLED),),
        ("a rollout that is made ahead begins one weight sync too early",),
    ),
    Row(
        "A stream trains on each group once, also after kills, and what it trains on is as long as what was begun.",
        (
            f"{STREAM}::test_a_run_trains_on_every_prompt_once_an_epoch_within_the_bound",
            f"{STREAM}::test_a_run_that_was_stopped_makes_the_groups_that_were_running_again",
            f"{STREAM}::test_a_continued_run_lists_each_rejected_group_once",
            "tests/rl/test_trained_lengths.py",
            "tests/benchmarks/test_books_of_streams.py",
        ),
        (Cell("kills.md", "run", "ppo, stream", KILLED),),
        (
            "a step does not wait for a group that must not get older",
            "a continued stream keeps the record of groups that it makes again",
        ),
    ),
    Row(
        "No token that is trained on is older than the bound.",
        (
            f"{SLOTS}::test_no_group_is_older_than_the_bound_lost_or_trained_twice_in_3000_random_schedules",
            "tests/e2e/test_async_run.py::test_no_token_is_older_than_the_bound",
        ),
        mistakes=("a group may become one step older than the bound",),
    ),
    Row(
        "The weight version of each token is true: transformers with the weights of that version gives the log-prob "
        "of the engine.",
        ("tests/e2e/test_stamped_versions.py",),
        mistakes=(
            "tokens are stamped with the version before that of their weights",
            "unfinished responses keep the KV cache of the old weights",
        ),
    ),
    Row(
        "Generation, tools, evaluation and training happen at the same time.",
        (
            f"{SCHEDULES}::test_the_next_rollout_begins_before_the_probe_of_its_weights_is_over",
            f"{SCHEDULES}::test_the_policy_trains_while_its_last_weights_are_probed",
            f"{BESIDE}::test_the_policy_trains_while_its_weights_are_evaluated",
            f"{BESIDE}::test_evaluations_beside_training_give_the_numbers_of_those_before_it",
            f"{SCHEDULES}::test_the_timeline_has_the_rollouts_beside_the_training",
            "tests/e2e/test_async_run.py::test_the_engine_works_while_the_policy_trains",
            "tests/tracking/test_timeline.py",
        ),
        (Saved("schedules", OVERLAP), Saved("schedules", COMPUTING)),
        (
            "the overlap is a share of the whole time",
            "what follows the last step is not in the timeline",
            "the policy waits for the sync of its weights",
            "the engines get the weights of the next step while they are evaluated",
        ),
        ("timeline.png",),
    ),
    Row(
        "A run learns from old rollouts, which it corrects; without a correction it is refused.",
        (
            "tests/config/test_mistakes.py::test_a_mistake_is_one_problem",
            "tests/e2e/test_async_run.py::test_old_rollouts_are_corrected_and_new_ones_agree_with_the_trainer",
            "tests/algo/test_correction.py",
        ),
        tuple(
            Cell("staleness.md", "S | correction", str(age), f"S = {age}, {{correction}}: accuracy {{at the end}}")
            for age in (0, 1, 4, 8)
        ),
        ("the correction is upside down",),
        ("staleness.png",),
    ),
    Row(
        "An environment that waits forever costs only its group, and is named with its turn. One that blocks all "
        "episodes is named with its line, and ends the run.",
        (
            f"{STREAM}::test_an_environment_that_never_answers_costs_its_group_and_is_named",
            "tests/agents/test_environment_agent.py::test_a_wait_has_a_deadline",
            "tests/launch/test_loop_thread.py",
            "tests/rl/test_agents_in_runs.py::test_an_async_step_that_blocks_all_episodes_ends_the_run",
        ),
        mistakes=(
            "a wait for an environment has no deadline of its own",
            "many short calls on an event loop count as one that blocks it",
            "a coroutine that blocks the event loop is not noticed",
        ),
    ),
    Row(
        "After the death of an engine its unfinished requests are made again, the same: no group is lost, and none is "
        "trained on twice.",
        (
            "tests/engines/test_engine_death.py",
            "tests/e2e/test_actor_death.py::test_a_run_whose_engine_was_killed_gives_the_same_numbers",
            "tests/e2e/test_actor_death.py::test_a_stream_whose_engine_was_killed_trains_on_every_group_once",
        ),
        mistakes=(
            "an engine that is started again has random weights",
            "an engine that is started again stamps its tokens with version 0",
            "requests that a dead engine had get other seeds",
        ),
        pages=("faults.md",),
    ),
    Row(
        "After the death of a process of agents its unfinished episodes begin again with the same seeds, and are "
        "trained on once.",
        (
            "tests/rl/test_episode_workers.py",
            "tests/e2e/test_episode_workers_in_runs.py",
            "tests/e2e/test_images_run.py::test_workers_send_images_as_the_driver_does",
        ),
    ),
    Row(
        "A group that takes far longer than the others is waited for at its deadline, trained on, and named as the "
        "reason of the wait.",
        (f"{STREAM}::test_a_step_waits_for_a_late_group_at_its_deadline_and_says_so",),
        mistakes=("a wait for a late group is one for a batch",),
    ),
    Row(
        "What is written between two turns is what the chat template writes there; a template that cannot go on is "
        "refused at the start.",
        ("tests/agents/test_bridge.py",),
        mistakes=(
            "the bridge begins one token too early, with the end of the turn again",
            "the bridge loses the line break after the end of a turn",
            "a stop token in the text of an answer counts as the end of the turn",
            "tokens that merge across the end of a turn are not noticed",
        ),
    ),
    Row(
        "The prompt of every turn is the ledger at that moment, token by token, in random conversations with tools.",
        (f"{SESSION}::test_the_prompt_of_every_request_is_the_ledger_at_that_moment",),
        mistakes=("what the model wrote is decoded and encoded again", "what an environment says is trained on"),
    ),
    Row(
        "Engine and trainer agree on the log-prob of each token of the model, in all turns.",
        (
            "tests/rl/test_agents_in_runs.py::test_log_probs_of_engine_and_trainer_agree_over_all_turns",
            "tests/e2e/test_foreign_agents.py::test_engine_and_trainer_agree_on_every_turn",
        ),
        mistakes=("the log-probs of a turn stand one token too late",),
    ),
    Row(
        "Where a history is edited or compacted, or sub-agents write at the same time, each sampled token is trained "
        "on once, and the episode counts as its unforked twin does.",
        (
            f"{SESSION}::test_a_rewritten_conversation_forks_and_each_sampled_token_is_the_models_once",
            f"{SESSION}::test_each_sampled_token_reaches_training_once",
            FORKS,
            "tests/rl/test_forks_on_ranks.py",
        ),
        mistakes=(
            "a fork keeps turns that its history does not have",
            "the ledgers of an episode are samples of their own in baselines",
            "each ledger of an episode weighs as much as an episode",
            "the ledgers of an episode are in several optimiser steps",
        ),
    ),
    Row(
        "The client of OpenAI works unchanged: tools, streams, repetitions after a cut connection, 64 sessions at a "
        "time; a wrong key is refused, and a sampling of its own too if agent.sampling says so.",
        (
            ENDPOINT,
            "tests/agents/test_endpoint_requests.py",
            "tests/agents/test_endpoint_ledgers.py",
            "tests/agents/test_endpoint_results.py",
            "tests/e2e/test_foreign_agents.py::test_a_program_with_the_client_of_openai_trains",
        ),
        (
            Count(
                "reward_attacks.md", "attack | what limits it | answer", "answer", "", "{1} attacks by clients in a run"
            ),
        ),
        (
            "a session answers whoever has no key of it",
            "a request that is sent again is a sample of its own",
            "a program may sample at a temperature of its own",
            "a reward without a turn of the model counts",
            "an answer has the log-probs of other tokens",
        ),
    ),
    Row(
        "Credit crosses what a tool wrote, and rewards of turns stand where the turns end, as computed by hand.",
        (
            "tests/rl/test_credit.py",
            f"{EPISODES}::test_reinforce_discounts_rewards_of_turns_from_where_they_stand",
            f"{EPISODES}::test_gae_has_rewards_of_turns_where_they_stand",
            f"{EPISODES}::test_a_baseline_compares_the_sums_of_all_rewards",
            f"{ADVANTAGE}::test_discounted_sums_are_those_of_a_walk_from_the_last_token_to_the_first",
        ),
        mistakes=(
            "estimators see what an environment wrote",
            "rewards of turns wait for the end of the response",
            "baselines compare rewards without those of turns",
        ),
    ),
    Row(
        "Files of OpenRLHF, TRL, SkyRL-gym and Gymnasium, an MCP server, an OpenEnv server and a program with the "
        "client of OpenAI train unchanged.",
        ("tests/e2e/test_foreign_agents.py", "tests/agents/test_compat.py", "tests/agents/test_openenv.py"),
        mistakes=(
            "an environment of TRL is asked for its reward only when the model ends the episode",
            "the feedback of an environment of OpenRLHF is not shown to the model",
            "an action that a server refuses is a failure of the episode",
        ),
    ),
    Row(
        "Models learn to use tools and turns, and to call a tool only where it helps.",
        ("tests/benchmarks/test_agent_curves.py",),
        (
            *(
                Cell("agent_curves.md", "example", f"[{name}]", f"{name}: right answers {RIGHT}")
                for name in ("calculator", "guess", "fences", "chat_client")
            ),
            Cell("when_to_call.md", "question", "the tool helps", f"calls where a tool helps {CALLS}"),
            Cell("when_to_call.md", "question", "the answer is", f"where it does not {CALLS}"),
            Cell("image_curves.md", "model", "Idefics3", "digits in images: {evaluation, start} -> {end}"),
        ),
        pages=("agent_curves.png", "when_to_call.png", "image_curves.png"),
    ),
    Row(
        "Code that a model writes reaches nothing outside its session and disturbs no other session.",
        ("tests/sandbox/test_jail.py", "tests/sandbox/test_hostile_code.py", "tests/sandbox/test_sandbox_session.py"),
        (
            Count(
                *("reward_attacks.md", "attack | root", "root", "stopped"),
                "{0} of {1} attacks from inside the jail are stopped",
            ),
            Count(
                *("reward_attacks.md", "by | attack", "run goes on", "yes"),
                "after {0} of {1} attacks by reward code the run goes on",
            ),
        ),
        (
            "code in the jail may open sockets",
            "the folder of a session has no limit",
            "each process of a session may have all of its memory",
            "a reply to another call counts",
        ),
    ),
    Row(
        "The time of tools is reported, and a run hardly ever waits only for tools.",
        (
            "tests/tracking/test_timeline.py",
            "tests/rl/test_agents_in_runs.py::test_the_timeline_tells_environments_from_engines",
            "tests/benchmarks/test_sandbox_costs.py",
        ),
        (Saved("sandbox", ALONE),),
        ("each of several requests begins an interval of its own",),
    ),
    Row(
        "A batch with images has the log-probs of its sequences alone, packed or padded, and those of the engine.",
        ("tests/models/test_vision.py", "tests/engines/test_engine_images.py", "tests/agents/test_agent_images.py"),
        (),
        (
            "more features than placeholders are not noticed",
            "the features of images survive a weight sync",
            "later requests of an episode have the images of the first one",
        ),
        ("image_curves.md",),
    ),
    Row(
        "What the driver does with the samples of a step takes at most half a microsecond of a CPU for each token.",
        (
            "tests/benchmarks/test_benchmarks.py::test_driver_prints_what_each_part_of_a_step_took",
            "tests/rl/test_sharding.py",
            "tests/rl/test_update.py",
        ),
        (Saved("driver", DRIVER),),
        (
            "the numbers of the tokens come back in another order than they were sent",
            "the critic is trained without its targets",
        ),
    ),
    Row(
        "Each row has the agent of its datasource, and a row of one turn is sampled as in a run without agents.",
        (
            "tests/agents/test_by_datasource.py",
            "tests/rl/test_agents_in_runs.py::test_rows_have_different_agents",
            "tests/rl/test_agents_in_runs.py::test_rows_of_one_turn_are_those_of_a_run_without_agents",
        ),
        (),
        ("all rows have the agent of agent.kind",),
    ),
    Row(
        "Harnesses that people use play the episodes, unchanged, and a model learns in one. One that crashes, hangs or "
        "cannot reach the endpoint is a failure that is counted and named, and the run goes on.",
        (
            "tests/agents/test_commands_of_episodes.py",
            "tests/agents/test_endpoint_apis.py",
            "tests/config/test_agent_flags.py::test_whole_agents_have_no_problem",
            "tests/e2e/test_failing_harnesses.py",
        ),
        (Cell("agent_curves.md", "example", "[harnesses]", f"Codex: digits above 4 {RIGHT}"),),
        (
            "a program that crashed is one that has finished",
            "a call of a tool in a namespace loses the namespace",
            "agent.on_error may not say how many failures a run takes",
        ),
    ),
)
