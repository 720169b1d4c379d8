"""Prompts to trajectories: n samples of each prompt from the engines, each with a seed of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import GenerationConfig, PreTrainedTokenizerBase

from rlhf_suite.config.runs import PPORun
from rlhf_suite.data.text_encoders import Prompt
from rlhf_suite.data.trajectory import Trajectory
from rlhf_suite.engines.generation import GenerationRequest, SamplingSettings, sample_seed
from rlhf_suite.engines.pool import EnginePool
from rlhf_suite.models.load import model_folder

TRAINING, EVALUATION = 0, 1  # streams of random numbers that never meet


class Collector:
    """Samples responses of the current policy."""

    def __init__(self, config: PPORun, prompts: Sequence[Prompt], engines: EnginePool, stop_ids: Sequence[int]) -> None:
        self.config, self.prompts, self.engines, self.stop_ids = config, prompts, engines, tuple(stop_ids)

    def collect(self, indices: Sequence[int], stream: int) -> list[Trajectory]:
        """Sample rollout.n_samples_per_prompt responses to each of the prompts `indices`.

        A greedy one as well, where the estimator needs it.
        """
        rollout = self.config.rollout
        started = self.begin(self.prompts, indices, rollout.n_samples_per_prompt)
        plan = [(t, self.sampling(rollout.temperature)) for t in started]
        if self.config.algo.advantage.needs("greedy"):
            plan += [(replace(t, greedy=True), self.sampling(0.0)) for t in self.begin(self.prompts, indices, 1)]
        trajectories = self.write(plan, (TRAINING, stream))
        self.rest()
        return trajectories

    def rest(self) -> None:
        """Lend the engines' memory to the models that come next (vllm.enable_sleep)."""
        if self.config.vllm.enable_sleep:
            self.engines.sleep()

    def wake(self) -> None:
        """Take it back for another round of sampling: the engines still have their weights."""
        if self.config.vllm.enable_sleep:
            self.engines.wake()

    def sampling(self, temperature: float) -> SamplingSettings:
        """The flags of `rollout` at a given temperature."""
        return SamplingSettings.of(self.config.rollout, temperature, self.stop_ids)

    def sample(
        self,
        prompts: Sequence[Prompt],
        indices: Sequence[int],
        samples: int,
        sampling: SamplingSettings,
        stream: tuple[int, int],
    ) -> list[Trajectory]:
        """`samples` trajectories of each of `prompts[indices]`, those of one prompt next to each other."""
        return self.write([(t, sampling) for t in self.begin(prompts, indices, samples)], stream)

    def begin(self, prompts: Sequence[Prompt], indices: Sequence[int], samples: int) -> list[Trajectory]:
        """Ledgers that hold their prompts."""
        return [
            Trajectory.start(index, group, sample, prompts[index].ids)
            for group, index in enumerate(indices)
            for sample in range(samples)
        ]

    def write(self, plan: Sequence[tuple[Trajectory, SamplingSettings]], stream: tuple[int, int]) -> list[Trajectory]:
        """Let the engines go on with each ledger under its settings."""
        requests = [
            GenerationRequest(
                id=i,
                prompt_ids=t.ids.tolist(),
                max_new_tokens=self.room(len(t.ids)),
                seed=self.seed(t, stream),
                sampling=sampling,
            )
            for i, (t, sampling) in enumerate(plan)
        ]
        for (trajectory, _), generation in zip(plan, self.engines.generate(requests), strict=True):
            trajectory.append_model(generation.ids, generation.log_probs, generation.weight_version)
            trajectory.finish_reason = generation.finish_reason
        return [trajectory for trajectory, _ in plan]

    def room(self, tokens: int) -> int:
        """How many tokens may follow a prompt of so many."""
        left = self.config.data.max_len - tokens
        return min(left, self.config.rollout.max_new_tokens or left)

    def seed(self, trajectory: Trajectory, stream: tuple[int, int]) -> int:
        """A seed that depends on the sample alone: not on the order of requests, the batch or the engine."""
        return sample_seed(self.config.train.seed, *stream, trajectory.prompt, trajectory.sample)


def stop_token_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end a response: the tokenizer's end of sequence and those of the model's generation config."""
    try:
        listed = GenerationConfig.from_pretrained(model_folder(model, "actor.model_name_or_path")).eos_token_id
    except OSError:  # a model folder need not have one
        listed = None
    others = listed if isinstance(listed, list) else [] if listed is None else [listed]
    return sorted({tokenizer.eos_token_id, *others})
