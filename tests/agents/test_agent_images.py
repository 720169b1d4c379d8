"""Episodes with images: an environment that answers with one, its tokens in the ledger, and room for it."""

from __future__ import annotations

import io

import pytest
from PIL import Image as Pillow
from scripted import Scripted, run

from rlhf_suite.agents.base import Start, Step, Task
from rlhf_suite.agents.bridge import Bridge
from rlhf_suite.agents.compaction import Compaction
from rlhf_suite.agents.environment import EnvironmentAgent
from rlhf_suite.agents.openrlhf import OpenRLHFEnvironment
from rlhf_suite.agents.parsing import TurnReader
from rlhf_suite.agents.session import Limits, Session, Shared
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.data.generation import SamplingSettings
from rlhf_suite.data.images import open_image
from rlhf_suite.data.row import Row
from rlhf_suite.data.text_encoders import PromptEncoder
from rlhf_suite.data.trajectory import ENVIRONMENT, PROMPT, Trajectory, to_batch
from vision import PICTURES, Seeing

pytestmark = pytest.mark.stack


@pytest.fixture(scope="module")
def seeing(tmp_path_factory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("vision"))


class Crops:
    """Shows a part of the image when it is asked to look, and ends then."""

    def __init__(self, answer=None) -> None:
        self.answer = answer

    async def reset(self, task: Task) -> Start:
        self.image = open_image(task.images[0].data)
        return Start()

    async def step(self, turn) -> Step:
        if "look" not in turn.content:
            return Step(reward=1.0, done=True)
        crop = self.image.crop((0, 0, 20, 20)) if self.answer is None else self.answer
        image = {"type": "image", "image": crop}
        return Step(({"role": "user", "content": [image, {"type": "text", "text": "closer"}]},))

    async def close(self) -> None: ...


def episode(seeing: Seeing, script, environment=Crops, max_images: int = 3, compaction=None, **limits):
    """Run an episode about one image; the policy and the episode."""
    config = DataConfig.of("ppo", apply_chat_template=True, image_key="image", max_len=400)
    row = Row({"input": "what is it?", "image": PICTURES[0]}, "rows", 1)
    prompt = PromptEncoder(seeing.tokenizer, config, keeps_chat=True, reader=seeing.processor).encode(row)
    stops, policy = (seeing.tokenizer.eos_token_id,), Scripted(seeing.tokenizer, script)
    bridge = Bridge(seeing.tokenizer, DataConfig.of("sft", apply_chat_template=True), stops)
    reader, limits = TurnReader(seeing.tokenizer, stops, None), Limits(**{"max_len": 400} | limits)
    shared = Shared(policy, bridge, reader, limits, images=seeing.processor, max_images=max_images)
    ledger = Trajectory.start(prompt, 0, 0)
    session = Session(shared, Task.of(prompt), ledger, (1,), SamplingSettings(stop_token_ids=stops))
    agent = EnvironmentAgent(environment, 8, 600.0, compaction=compaction)
    return policy, run(agent.run, Task.of(prompt), session)


@pytest.mark.notices(
    "later requests of an episode have the images of the first one",
    "data/trajectory.py",
    "        self.images += images\n",
    "",
)
def test_an_image_of_the_environment_is_in_the_ledger_and_in_later_requests(seeing):
    policy, found = episode(seeing, ["look", "look", "seven"])
    (ledger,) = found.ledgers
    assert [len(request.images) for request in policy.asked] == [1, 2, 3]
    assert policy.asked[2].images == ledger.images
    placeholder = seeing.processor.placeholder
    for image in ledger.images:
        tokens = ledger.ids[image.start : image.start + image.length].tolist()
        assert tokens == seeing.processor.tokens(image.data) and placeholder in tokens
    assert ledger.ids.tolist().count(placeholder) == 3 * 4
    assert all(ledger.owner[image.start] == ENVIRONMENT for image in ledger.images[1:])
    with Pillow.open(io.BytesIO(PICTURES[0])) as whole:
        assert open_image(ledger.images[1].data).tobytes() == whole.convert("RGB").crop((0, 0, 20, 20)).tobytes()
    assert to_batch(found.ledgers).images == (tuple(image.data for image in ledger.images),)
    assert found.ending == "finished" and found.outcome.reward == 1.0


@pytest.mark.notices(
    "an image too many is appended to an episode",
    "agents/session.py",
    "self.is_full = ids is None or has_many or",
    "self.is_full = ids is None or",
)
def test_an_image_too_many_ends_the_episode_and_is_not_dropped(seeing):
    policy, found = episode(seeing, ["look", "look", "never written"], max_images=2)
    (ledger,) = found.ledgers
    assert (found.ending, len(policy.asked), len(ledger.images)) == ("full", 2, 2)
    assert ledger.ids.tolist().count(seeing.processor.placeholder) == 2 * 4


def test_a_ledger_behind_a_summary_has_the_images_of_the_prompt(seeing):
    policy, found = episode(seeing, ["look", "look", "SUM", "seven"], compaction=Compaction(70, "sum up", 40))
    first, second = found.ledgers
    assert [len(request.images) for request in policy.asked] == [1, 2, 3, 1]
    (image,), placeholder = second.images, seeing.processor.placeholder
    assert image.data == first.images[0].data and second.ids.tolist().count(placeholder) == 4
    assert second.ids[image.start : image.start + image.length].tolist() == seeing.processor.tokens(image.data)
    assert second.owner[image.start] == PROMPT and found.ending == "finished"


def test_an_image_without_room_ends_the_episode(seeing):
    _, found = episode(seeing, ["look", "never written"], max_len=50)
    (ledger,) = found.ledgers
    assert (found.ending, len(ledger.images)) == ("full", 1)
    assert len(ledger.ids) < 50 and ledger.ids[-1] == seeing.tokenizer.eos_token_id


def test_long_texts_are_cut_and_images_stay_whole(seeing):
    class Talks(Crops):
        async def step(self, turn) -> Step:
            step = await super().step(turn)
            if step.messages:
                step.messages[0]["content"][1]["text"] = "x" * 300
            return step

    _, found = episode(seeing, ["look", "seven"], Talks, max_feedback_tokens=20)
    (ledger,) = found.ledgers
    assert len(ledger.images) == 2 and "[...]" in seeing.tokenizer.decode(ledger.ids)
    assert found.ending == "finished"


@pytest.mark.parametrize("answer", [b"no image", 17, "missing.png"])
def test_what_is_no_image_is_a_failure_of_the_environment(seeing, answer):
    _, found = episode(seeing, ["look"], lambda: Crops(answer))
    assert found.ending == "failed" and "image" in found.outcome.reason


def test_an_environment_may_ask_another_question_about_the_same_image(seeing):
    class Asks(Crops):
        async def reset(self, task: Task) -> Start:
            await super().reset(task)
            return Start(({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and now?"}]},))

    policy, found = episode(seeing, ["seven"], Asks)
    assert [image.data for image in policy.asked[0].images] == PICTURES[:1]
    assert "and now?" in seeing.tokenizer.decode(found.ledgers[0].ids)


RED = Pillow.new("RGB", (20, 20), "red")


class Screens:
    """An environment of OpenRLHF that shows an image, whose placeholder it writes into its feedback."""

    def __init__(self, images=(RED,)) -> None:
        self.images, self.turns = list(images), 0

    async def reset(self, states):
        return {"observation": states["observation"]}

    async def step(self, states):
        self.turns += 1
        if self.turns == 2:
            return {"rewards": 1.0, "environment_feedback": "", "done": True}
        feedback = "\nThe screen: <image>\nGo on: "
        return {"rewards": 0.0, "environment_feedback": feedback, "environment_images": self.images, "done": False}


@pytest.mark.notices(
    "images of OpenRLHF's feedback are dropped",
    "agents/openrlhf.py",
    'images=tuple(given.get("environment_images") or ()),',
    "images=(),",
)
def test_images_in_the_feedback_of_an_openrlhf_environment_are_seen(seeing):
    policy, found = episode(seeing, ["look", "seven"], lambda: OpenRLHFEnvironment(Screens))
    (ledger,) = found.ledgers
    assert [len(request.images) for request in policy.asked] == [1, 2] and found.outcome.reward == 1.0
    shown = ledger.images[1]
    assert ledger.owner[shown.start] == ENVIRONMENT and open_image(shown.data).getpixel((3, 3)) == (255, 0, 0)
    assert "The screen:" in seeing.tokenizer.decode(ledger.ids[: shown.start])


def test_images_without_places_in_the_text_are_a_failure(seeing):
    two = lambda: OpenRLHFEnvironment(lambda: Screens(2 * [Pillow.new("RGB", (9, 9))]))  # noqa: E731
    assert "the text has places for 1 images, and there are 2" in episode(seeing, ["look"], two)[1].outcome.reason
