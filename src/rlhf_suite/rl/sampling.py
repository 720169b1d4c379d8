"""Prompts to trajectories: n samples of each prompt from the engines, each with a seed of its own."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from itertools import chain
from typing import Any

from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_suite.agents.episodes import EpisodeRunner
from rlhf_suite.background import Ended
from rlhf_suite.config.rollout import RolloutConfig
from rlhf_suite.data.generation import GenerationRequest, SamplingSettings, sample_seed
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.models.load import model_folder

TRAINING, EVALUATION = 0, 1  # streams of random numbers that never meet


class Sampler:
    """Samples responses of the current policy."""

    def __init__(  # noqa: PLR0913 - values instead of the whole run
        self,
        config: RolloutConfig,
        prompts: Sequence[Prompt],
        engines: EnginePool,
        stop_ids: Sequence[int],
        *,
        seed: int,
        max_len: int,
        adds_greedy: bool,
        sleeps: bool,
        episodes: EpisodeRunner | None = None,
        never: Sequence[int] = (),
    ) -> None:
        self.config, self.prompts, self.engines, self.stop_ids = config, prompts, engines, tuple(stop_ids)
        self.seed, self.max_len = seed, max_len
        self.episodes = episodes  # of an agent; None: a response is one turn
        self.never = never  # tokens that are not sampled
        self.adds_greedy = adds_greedy  # whether the estimator needs a greedy response to each prompt
        self.sleeps = sleeps  # whether the engines lend their memory to the models (vllm.enable_sleep)

    def sample_rollout(self, indices: Sequence[int], stream: int, ended: Ended[Any]) -> Iterator[list[Trajectory]]:
        """Yield the samples of each of the prompts `indices`, in the order in which they are complete:
        rollout.n_samples_per_prompt of a prompt, and a greedy one if it is needed. `ended` may watch other work."""
        for group in [self.start(group, index, stream) for group, index in enumerate(indices)]:
            ended.add(group)
        yield from ended.results(len(indices))
        self.sleep()

    def start(self, group: int, index: int, stream: int) -> Future[list[Trajectory]]:
        """Start the samples of a prompt that the run trains on, and a greedy one if the estimator needs it."""
        started = self.begin(self.prompts, group, index, self.config.n_samples_per_prompt)
        plan = [(t, self.settings(self.config.temperature)) for t in started]
        if self.adds_greedy:
            plan += [(replace(t, greedy=True), self.settings(0.0)) for t in self.begin(self.prompts, group, index, 1)]
        return self.engines.start(self.write(self.prompts, plan, (TRAINING, stream)))

    def sleep(self) -> None:
        """Lend the engines' memory to the models that come next (vllm.enable_sleep)."""
        if self.sleeps:
            self.pause()

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

    def sample(
        self,
        prompts: Sequence[Prompt],
        indices: Sequence[int],
        samples: int,
        sampling: SamplingSettings,
        stream: tuple[int, int],
        shown: Callable[[Iterator[list[Trajectory]], int], Iterator[list[Trajectory]]] = lambda groups, total: groups,
    ) -> list[Trajectory]:
        """Return `samples` trajectories of each of `prompts[indices]`, those of one prompt next to each other. `shown`
        passes the groups on and may show how many there are, of their number."""
        started = [self.begin(prompts, group, index, samples) for group, index in enumerate(indices)]
        groups = [self.engines.start(self.write(prompts, [(t, sampling) for t in group], stream)) for group in started]
        ended: Ended[list[Trajectory]] = Ended("the samples of an evaluation")
        for group in groups:
            ended.add(group)
        deque(shown(ended.results(len(groups)), len(groups)), maxlen=0)  # what fails first is raised first
        return list(chain.from_iterable(group.result(0) for group in groups))

    def limited(self, max_turns: int) -> Sampler:
        """Return a sampler of the same episodes with at most so many turns of the model."""
        assert self.episodes is not None, "without an agent every response is one turn"
        result = copy(self)
        result.episodes = self.episodes.limited(max_turns)
        return result

    def begin(self, prompts: Sequence[Prompt], group: int, index: int, samples: int) -> list[Trajectory]:
        """Return ledgers that hold the prompt `index`."""
        prompt = prompts[index]
        images = prompt.images or ()
        return [Trajectory.start(index, group, sample, prompt.ids, images) for sample in range(samples)]

    async def write(
        self,
        prompts: Sequence[Prompt],
        plan: Sequence[tuple[Trajectory, SamplingSettings]],
        stream: tuple[int, int],
    ) -> list[Trajectory]:
        """Let the engines continue the ledgers of `prompts`, each under its settings. A seed depends on the sample
        alone, not on the order of requests, the batch or the engine."""
        seeds = [(self.seed, *stream, t.prompt, t.sample) for t, _ in plan]
        if self.episodes is None:
            work = [self.respond(*each, sample_seed(*seed)) for each, seed in zip(plan, seeds, strict=True)]
            return list(await asyncio.gather(*work))
        episodes = [
            self.episodes.run(prompts[t.prompt], t, sampling, seed)
            for (t, sampling), seed in zip(plan, seeds, strict=True)
        ]
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
        t.append_model(generation.ids, generation.log_probs, generation.versions)
        t.finish_reason = generation.finish_reason
        return t

    def max_new_tokens(self, prompt_tokens: int) -> int:
        """Return how many tokens may follow a prompt of so many."""
        left = self.max_len - prompt_tokens
        return min(left, self.config.max_new_tokens or left)


def stop_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a response: the tokenizer's end of sequence and those of the generation config."""
    try:
        listed = GenerationConfig.from_pretrained(model_folder(model, "actor.model_name_or_path")).eos_token_id
    except OSError:  # a model folder need not have one
        listed = None
    others = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return sorted({tokenizer.eos_token_id, *others})
