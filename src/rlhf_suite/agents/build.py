"""From flags to an agent and its episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rlhf_suite import registry
from rlhf_suite.agents.bridge import Bridge
from rlhf_suite.agents.compaction import Compaction
from rlhf_suite.agents.cutting import Limits
from rlhf_suite.agents.endpoint import Sessions
from rlhf_suite.agents.episodes import Agent, AgentsByDatasource, AgentSetup, Episodes
from rlhf_suite.agents.parsing import TurnReader
from rlhf_suite.agents.session import Policy, Shared
from rlhf_suite.config.check.agent_file import OURS, RAW, TRL, export_of, has_tools_beside
from rlhf_suite.config.declarations.agent import AgentConfig, ChosenAgent, agents_of
from rlhf_suite.config.declarations.reward import has_source
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.data.images import ImageReader
from rlhf_suite.launch.loop_thread import LoopThread
from rlhf_suite.rewards.base import Choice

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROLES = {"user_messages": "user", "tool_messages": "tool"}  # by what an agent needs the chat template to show


def make_agent(
    chosen: ChosenAgent,
    must_score: bool,
    choice: Choice | None = None,
    serve: Callable[[str], Sessions] | None = None,
    max_characters: int = 0,
) -> Agent:
    """Return an agent of a run, made by the function that its kind names. The arguments are those of `AgentSetup`.

    Raises:
        UserError: the file cannot be imported, this machine offers no jail for Python, or a function of the user's own
        returns something else.
    """
    setup = AgentSetup(chosen, must_score, choice or Choice(), serve, max_characters)
    made: Agent = registry.agent.load(chosen.config.kind)(setup)
    if not all(callable(getattr(made, name, None)) for name in ("run", "limit_turns")):
        wanted = "an object with async run(task, session) and limit_turns(max_turns)"
        raise registry.agent.wrong_result(chosen.config.kind, made, wanted)
    return made


def make_episodes(
    run: Run,
    policy: Policy,
    tokenizer: PreTrainedTokenizerBase,
    stop_ids: Sequence[int],
    serve: Callable[[str], Sessions],
    images: ImageReader | None = None,
) -> Episodes | None:
    """Return what runs the episodes of a run; None if nobody answers the model's turns. `serve` makes a server of
    sessions at an address; `images` reads those of a run that has any.

    Raises:
        UserError: the user's file cannot be imported, this machine offers no jail for Python, or what
        `make_conversations` raises.
    """
    config = run.agent
    if not config.has_turns:
        return None
    first, *others = agents_of(config, run.train.agent_func_path)
    bridge, reader = make_conversations(run, tokenizer, stop_ids)
    most = run.data.max_len * max(map(len, tokenizer.get_vocab()))
    choice = Choice(run.reward.reward_key, run.reward.combine)
    shared_setup = (not has_source(run.reward), choice, serve, most)
    agent = make_agent(first, *shared_setup)
    if others:
        made = [(agent_config.datasets, make_agent(agent_config, *shared_setup)) for agent_config in others]
        agent = AgentsByDatasource({name: other for names, other in made for name in names}, agent)
    feedback = config.max_feedback_tokens if reads("max_feedback_tokens", config) else None
    limits = Limits(run.data.max_len, run.rollout.max_new_tokens, feedback, config.cut_to_fit)
    most = run.data.max_images_per_prompt
    shared = Shared(policy, bridge, reader, limits, config.history == "template", images, most)
    return Episodes(agent, shared, config.max_concurrent)


def make_conversations(
    run: Run, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]
) -> tuple[Bridge, TurnReader]:
    """Return what continues the conversations of a run's agents, and what reads the turns of the model.

    Raises:
        UserError: a conversation cannot go on with this chat template, or the parser of tool calls does not fit the
        tokenizer.
    """
    config = run.agent
    bridge = Bridge(tokenizer, run.data, stop_ids)
    if run.data.apply_chat_template:
        agents = agents_of(config, run.train.agent_func_path)
        spoken = {chosen.key: roles(chosen) for chosen in agents}
        bridge.check(sorted(set(chain.from_iterable(spoken.values()))))
        for chosen in agents:
            if (compaction := Compaction.of(chosen.config)) is not None:
                compaction.check(bridge, run.data.max_len, config.max_feedback_tokens, spoken[chosen.key])
    return bridge, TurnReader(tokenizer, stop_ids, config.tool_parser, config.vllm_tool_parser)


def reads(flag: str, config: AgentConfig) -> bool:
    """Return whether an agent of a run reads a flag of `agent`."""
    return any(registry.agent.reads(kind, flag) for kind in config.kinds)


def watch_calls(loop: LoopThread, config: AgentConfig) -> None:
    """Watch over the event loop of the episodes: an `async` function of the user's that blocks it stops all of them.
    The program of an endpoint never runs on it."""
    if reads("tool_timeout_s", config):
        loop.watch(config.tool_timeout_s, "agent.tool_timeout_s")


def roles(chosen: ChosenAgent) -> list[str]:
    """Return the roles of the messages with which conversations go on."""
    roles = [role for need, role in ROLES.items() if chosen.config.needs(need)]
    if not chosen.config.needs("environment"):
        return roles
    form = OURS if chosen.file is None else export_of(chosen.file).form
    beside = ["tool"] if has_tools_beside(chosen) else []
    return [*roles, *beside, *([] if form in RAW else {TRL: ["tool"]}.get(form, ["user"]))]
