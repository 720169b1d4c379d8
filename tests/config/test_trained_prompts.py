"""The prompts that a model was trained on are those of the next task; other ones that the user chooses are said."""

from __future__ import annotations

import json

import pytest

from rlhf_suite.composition.arguments import parse
from rlhf_suite.config.declarations.data import DataConfig
from rlhf_suite.config.declarations.runs import TASKS, Run
from rlhf_suite.config.plan.loop_stages import plan_stages
from rlhf_suite.models.prompt_format import FILE, PromptFormat, format_of, read
from rlhf_suite.preflight.jobs import preflight

TEMPLATE = "Q: {}\nA: "
PLAIN, CHAT = PromptFormat(False, TEMPLATE), PromptFormat(True, None, ("enable_thinking:false",))
ROWS = {
    "sft": "data.dataset=builtin:reverse data.output_key=output",
    "rm": "data.dataset=builtin:reverse_pairs data.prompt_key=prompt",
    "dpo": "data.dataset=builtin:reverse_pairs data.prompt_key=prompt",
    "kto": "data.dataset=builtin:reverse_labelled",
    "distill": "data.dataset=builtin:reverse data.output_key=output teacher.model_name_or_path=builtin:tiny",
    "prm": "data.dataset=builtin:reverse_steps data.steps_key=steps",
    "ppo": "data.prompt_dataset=builtin:reverse data.label_key=label reward.rule=exact_match",
    "generate": "data.prompt_dataset=builtin:reverse",
    "chat": "",
    "rejection_sampling": "data.prompt_dataset=builtin:reverse data.label_key=label reward.rule=exact_match",
    "iterative_dpo": "data.prompt_dataset=builtin:reverse data.label_key=label reward.rule=exact_match",
    "conditional_sft": "data.prompt_dataset=builtin:reverse data.label_key=label reward.rule=exact_match",
}


@pytest.fixture
def model(tmp_path):
    """Make a model folder that says how its prompts looked."""

    def make(trained, name="model"):
        folder = tmp_path / name
        folder.mkdir()
        trained.write(folder)
        return folder

    return make


def found_for(*words):
    found = preflight(parse([word for word in words if word]))
    assert not found.problems, found.problems
    return found


@pytest.mark.notices(
    "the template that a model was trained with is forgotten",
    "models/prompt_format.py",
    'values["input_template"] = recorded.input_template',
    "pass",
)
@pytest.mark.parametrize("task", ROWS)
def test_every_task_makes_the_prompts_that_its_model_was_trained_on(task, model):
    folder = model(PLAIN)
    found = found_for(f"task={task}", f"actor.model_name_or_path={folder}", *ROWS[task].split())
    (run,) = found.runs
    assert format_of(run) == PLAIN
    assert found.notes == [f"data.input_template='Q: {{}}\\nA: ', as {folder} was trained ({FILE} in its folder)"]
    assert found.config.data.input_template == TEMPLATE  # --cfg job shows what runs


@pytest.mark.parametrize("task", ROWS)
def test_a_model_that_was_trained_with_its_chat_template_is_asked_with_it(task, model):
    found = found_for(f"task={task}", f"actor.model_name_or_path={model(CHAT)}", *ROWS[task].split())
    assert format_of(found.runs[0]) == CHAT


@pytest.mark.notices(
    "a template that the user chooses gives way to that of the model",
    "models/prompt_format.py",
    "if not {*CHOICES} & {*chosen}:",
    "if True:",
)
@pytest.mark.notices(
    "other prompts than a model was trained on are not said",
    "preflight/trained_prompts.py",
    "if used is not None and used != trained:",
    "if False:",
)
@pytest.mark.parametrize("task", ROWS)
def test_other_prompts_that_the_user_chooses_are_used_and_contradicted(task, model):
    folder = model(PLAIN)
    words = ["data.input_template=null", *(["data.apply_chat_template=false"] if task == "chat" else [])]
    found = found_for(f"task={task}", f"actor.model_name_or_path={folder}", *ROWS[task].split(), *words)
    assert found.runs[0].data.input_template is None
    (note,) = found.notes
    assert f"{folder} was trained with data.input_template='Q: {{}}\\nA: ', but this run has" in note
    assert "data.input_template=null" in note


def test_every_task_that_makes_prompts_is_tested():
    of_models = {name for name in TASKS if format_of(Run.of(name)) is not None or name == "prm"}
    assert of_models == {*ROWS, "score", "serve_train"}


def test_a_choice_of_a_preset_is_one_of_the_user(model):
    found = found_for(
        "task=sft", "data=messages", f"actor.model_name_or_path={model(PLAIN)}", "data.dataset=builtin:reverse"
    )
    assert found.runs[0].data.apply_chat_template
    assert "was trained with data.input_template" in found.notes[0]


@pytest.mark.parametrize("task", ["rejection_sampling", "iterative_dpo", "conditional_sft"])
def test_the_stages_of_a_loop_have_the_prompts_of_its_model(task, model):
    found = found_for(f"task={task}", f"actor.model_name_or_path={model(PLAIN)}", *ROWS[task].split())
    assert {format_of(stage.run) for stage in plan_stages(found.runs[0])} == {PLAIN}


def test_other_models_of_a_run_that_read_other_prompts_are_named(model):
    actor, teacher = model(PLAIN, "student"), model(CHAT, "teacher")
    words = ROWS["distill"].split()[:-1]
    found = found_for(
        "task=distill", f"actor.model_name_or_path={actor}", f"teacher.model_name_or_path={teacher}", *words
    )
    assert [note for note in found.notes if note.startswith(f"teacher.model_name_or_path={teacher} was trained with")]
    reward = model(PromptFormat(False, "User: {}"), "rm")
    words = ["data.prompt_dataset=builtin:reverse", f"reward.model_name_or_path={reward}"]
    found = found_for("task=ppo", f"actor.model_name_or_path={actor}", *words)
    assert [note for note in found.notes if note.startswith(f"reward.model_name_or_path={reward} was trained with")]


@pytest.mark.notices(
    "a reward model gets the prompts of generated rows in its template once more",
    "preflight/trained_prompts.py",
    "column is None or run.data.query_key in column",
    "column is None",
)
def test_score_renders_rows_that_have_no_text_of_their_own(model, tmp_path):
    rows, judge = tmp_path / "rows.jsonl", model(PLAIN)
    words = ("task=score", f"reward.model_name_or_path={judge}", f"data.dataset={rows}")
    rows.write_text(json.dumps({"prompt": "2+2", "response": "4"}) + "\n")
    assert found_for(*words).runs[0].data.input_template == TEMPLATE
    rows.write_text(json.dumps({"prompt": "Q: 2+2", "response": "4", "reward_query": "Q: 2+2\nA: 4"}) + "\n")
    found = found_for(*words)
    assert found.runs[0].data.input_template is None and not found.notes


def test_a_served_reward_model_says_what_its_clients_should_send(model):
    found = found_for("task=serve_rm", f"reward.model_name_or_path={model(PLAIN)}")
    assert "was trained with data.input_template='Q: {}\\nA: ': clients send prompts like these" in found.notes[0]


def test_plain_text_and_solutions_with_marks_have_no_prompts(model):
    folder = model(PLAIN)
    words = (f"actor.model_name_or_path={folder}", "data.dataset=builtin:reverse", "actor.pretrain_mode_enable=true")
    assert not found_for("task=sft", *words).notes
    marked = found_for("task=prm", f"actor.model_name_or_path={folder}", "data.dataset=builtin:reverse_steps")
    assert marked.runs[0].data.input_template is None
    assert PromptFormat.of(DataConfig.of("prm")) is None


def test_texts_that_hold_whole_dialogues_are_put_into_no_template():
    markers = ["Human:", "Assistant:"]
    assert PromptFormat.of(DataConfig.of("sft", turn_markers=markers)) == PromptFormat()
    assert PromptFormat.of(DataConfig.of("dpo", input_template=TEMPLATE)) == PromptFormat()
    assert PromptFormat.of(DataConfig.of("dpo", input_template=TEMPLATE, prompt_key="prompt")) == PLAIN
    assert PromptFormat.of(DataConfig.of("ppo")) == PromptFormat()


@pytest.mark.parametrize("text", ["{", "[]", '{"input_template": 3}', '{"apply_chat_template": "yes"}'])
def test_a_damaged_record_is_one_sentence(text, model):
    folder = model(PLAIN)
    (folder / FILE).write_text(text)
    found = preflight(parse(["task=generate", f"actor.model_name_or_path={folder}", *ROWS["generate"].split()]))
    (problem,) = found.problems
    assert problem.key == "actor.model_name_or_path" and str(folder / FILE) in problem.what


def test_a_record_is_read_as_it_was_written(tmp_path):
    assert read(tmp_path) is None
    for trained in (PLAIN, CHAT, PromptFormat()):
        trained.write(tmp_path)
        assert read(tmp_path) == trained
