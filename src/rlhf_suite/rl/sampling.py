"""Prompts to trajectories: n samples of each prompt from the engines, each with a seed of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_suite.agents.episodes import EpisodeRunner
from rlhf_suite.config.declarations.rollout import RolloutConfig
from rlhf_suite.data.ending import Ending
from rlhf_suite.data.generation import GenerationRequest, SamplingSettings, sample_seed
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory, zeros
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.models.load import model_folder

TRAINING, EVALUATION = 0, 1  # streams of random numbers that never meet


class Sampler:
    """Samples responses of a model: of the current policy in a rollout, or to the prompts of a file."""

    def __init__(  # noqa: PLR0913 - values instead of the whole run
        self,
        config: RolloutConfig,
        engines: EnginePool,
        stop_ids: Sequence[int],
        *,
        seed: int,
        max_len: int,
        adds_greedy: bool = False,
        sleeps: bool = False,
        episodes: EpisodeRunner | None = None,
        never: Sequence[int] = (),
    ) -> None:
        self.config, self.engines, self.stop_ids = config, engines, tuple(stop_ids)
        self.seed, self.max_len = seed, max_len
        self.episodes = episodes  # of an agent; None: a response is one turn
        self.never = never  # tokens that are not sampled
        self.adds_greedy = adds_greedy  # whether the estimator needs a greedy response to each prompt
        self.sleeps = sleeps  # whether the engines lend their memory to the models (vllm.enable_sleep)

    def start(self, group: int, prompt: Prompt, stream: int) -> Future[list[Trajectory]]:
        """Start the samples of a prompt that the run trains on, and a greedy one if the estimator needs it."""
        settings = self.settings(self.config.temperature)
        plan = [(t, settings) for t in new_ledgers(prompt, group, self.config.n_samples_per_prompt)]
        if self.adds_greedy:
            plan += [(replace(t, greedy=True), self.settings(0.0)) for t in new_ledgers(prompt, group, 1)]
        return self.engines.start(self.write(plan, (TRAINING, stream)))

    def pause(self) -> None:
        """Interrupt the responses under way, which keep their tokens, and lend the engines' memory to the models."""
        self.engines.pause()
        if self.sleeps:
            self.engines.sleep()

    def resume(self) -> None:
        """Continue after `pause`; a weight sync has taken the memory back."""
        self.engines.resume()

    def wake(self) -> None:
        """Take the memory back for another round of sampling: the engines still have their weights."""
        if self.sleeps:
            self.engines.wake()
            self.engines.resume()

    def settings(self, temperature: float) -> SamplingSettings:
        """Return the flags of `rollout` at a given temperature."""
        return SamplingSettings.of(self.config, temperature, self.stop_ids, self.never)

    def begin(
        self, group: int, prompt: Prompt, samples: int, sampling: SamplingSettings, stream: tuple[int, ...]
    ) -> Future[list[Trajectory]]:
        """Start `samples` responses to a prompt."""
        return self.engines.start(self.write([(t, sampling) for t in new_ledgers(prompt, group, samples)], stream))

    def limit_turns(self, max_turns: int) -> Sampler:
        """Return a sampler of the same episodes with at most so many turns of the model."""
        assert self.episodes is not None, "without an agent every response is one turn"
        result = copy(self)
        result.episodes = self.episodes.limit_turns(max_turns)
        return result

    def with_sampling(self, **changes: Any) -> Sampler:
        """Return a sampler with other values of the flags of `rollout`, such as the fixed ones of a benchmark."""
        result = copy(self)
        result.config = replace(self.config, **changes)
        return result

    async def write(
        self, plan: Sequence[tuple[Trajectory, SamplingSettings]], stream: tuple[int, ...]
    ) -> list[Trajectory]:
        """Let the engines continue ledgers that hold their prompts, each under its settings. A seed depends on the
        sample alone, not on the order of requests, the batch or the engine."""
        seeds = [(self.seed, *stream, t.prompt.index, t.sample) for t, _ in plan]
        if self.episodes is None:
            work = [self.respond(*arguments, sample_seed(*seed)) for arguments, seed in zip(plan, seeds, strict=True)]
            return list(await asyncio.gather(*work))
        episodes = [self.episodes.run(t, sampling, seed) for (t, sampling), seed in zip(plan, seeds, strict=True)]
        return list(chain.from_iterable(await asyncio.gather(*episodes)))

    async def respond(self, t: Trajectory, sampling: SamplingSettings, seed: int) -> Trajectory:
        """Let an engine continue a ledger by one response."""
        request = GenerationRequest(
            id=t.sample,
            prompt_ids=t.ids.tolist(),
            max_new_tokens=self.max_new_tokens(len(t.ids)),
            seed=seed,
            sampling=sampling,
            images=t.images,
        )
        generation = await self.engines.generate(request)
        log_probs = generation.log_probs if sampling.log_probs else zeros(generation.ids)
        t.append_model(generation.ids, log_probs, generation.versions, generation.routes)
        t.ending = Ending.of_response(generation.finish_reason)
        return t

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens may follow a prompt of so many."""
        left = self.max_len - prompt_tokens
        return min(left, self.config.max_new_tokens or left)


def new_ledgers(prompt: Prompt, group: int, samples: int) -> list[Trajectory]:
    """Return a ledger with the prompt for each of so many samples of it."""
    return [Trajectory.start(prompt, group, sample) for sample in range(samples)]


def stop_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a response: the tokenizer's end of sequence and those of the generation config."""
    try:
        listed = GenerationConfig.from_pretrained(model_folder(model, "actor.model_name_or_path")).eos_token_id
    except OSError:  # a model folder need not have one
        listed = None
    others = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return sorted({tokenizer.eos_token_id, *others})
