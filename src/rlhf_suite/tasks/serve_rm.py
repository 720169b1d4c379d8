"""task=serve_rm: serve a reward model over HTTP, for `reward.remote_url` of another run (docs/rewards_servers.md)."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from rlhf_suite.config.check.lacking import read_token
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ModelPlan
from rlhf_suite.disk import write_json
from rlhf_suite.launch.environment import device_kind
from rlhf_suite.models.reward_model import score_constants
from rlhf_suite.rl.judge import TextJudge
from rlhf_suite.serving.http_server import Guard, address_of, listen, make_app, serve
from rlhf_suite.serving.reward_service import PATH, RewardService
from rlhf_suite.tracking.console import show_line


def run(config: Run, folder: Path) -> dict[str, float]:
    """Serve until a signal asks to stop. Return the number of texts scored and of forward passes.

    The file `server.json` in `folder` has the address and the process id.

    Raises:
        UserError: the address is in use, or other machines could connect although no token is set.
    """
    reward, limits = config.reward, config.serve
    assert reward.model_name_or_path is not None
    token = read_token(config)
    with closing(listen(limits)) as listener:  # before the model loads: an address that is taken is told at once
        constants = score_constants(reward.model_name_or_path, reward)
        plan = ModelPlan("reward", reward.model_name_or_path, "value", load_in_4bit=config.ds.load_in_4bit)
        model = TextJudge(plan, config.ds, device_kind(config.launch), constants, limits.batch_size)
        service = RewardService(model, limits)
        app = make_app(PATH, service.answer, service.lifespan, int(limits.max_request_mb * 2**20))
        url = f"{address_of(listener)}{PATH}"
        write_json(folder / "server.json", {"url": url, "pid": os.getpid()})
        show_line(f"serving {reward.model_name_or_path} at {url} (Ctrl-C ends it)")
        serve(Guard(app, token), listener)
    return {"serve/texts": float(service.batcher.rows), "serve/forwards": float(service.batcher.calls)}
