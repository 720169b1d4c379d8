"""What an agent needs of the tokenizer is tried before Ray, models and engines start."""

from __future__ import annotations

import json
import shlex

import pytest

from rlhf_suite.cli import main
from rlhf_suite.run_folders.run_folder import RunFolder

pytestmark = pytest.mark.stack

AGENT = """
class SumEnv:
    def reset(self, **row):
        return None

    def add(self, a: int) -> str:
        "Add one to a number.\\n\\nArgs:\\n    a: the number"
        return str(a + 1)

    def get_reward(self) -> float:
        return 1.0
"""


@pytest.mark.notices(
    "whether a conversation can go on with the chat template is tried when everything has started",
    "tasks/ppo.py",
    "        make_conversations(config, tokenizer, stop_token_ids(plan.models[ACTOR].path, tokenizer))\n",
    "        pass\n",
)
def test_a_template_without_tool_calls_is_refused_before_anything_starts(tmp_path, capsys):
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": "1 + 1 ="}) + "\n")
    words = (
        f"task=ppo actor.model_name_or_path=builtin:tiny agent.kind=environment "
        f"train.agent_func_path={tmp_path}/agent.py data.prompt_dataset={tmp_path}/rows.jsonl "
        f"data.apply_chat_template=true reward.rule=null eval.steps=-1 launch.device=cpu run_dir={tmp_path}/run"
    )
    assert main(shlex.split(words)) == 2
    assert "the chat template does not render tool calls" in capsys.readouterr().err
    assert not RunFolder(tmp_path / "run").logs.exists(), "actors have started"
