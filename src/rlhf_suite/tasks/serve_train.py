"""task=serve_train: training, call by call, over HTTP in the protocol of Tinker (docs/serve_train.md)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_suite.config.check.lacking import read_token
from rlhf_suite.config.declarations.runs import Run
from rlhf_suite.config.plan.run_plan import ACTOR, Plan
from rlhf_suite.disk import write_json
from rlhf_suite.errors import RunError
from rlhf_suite.launch.processes import keep_freed_memory
from rlhf_suite.models.load import model_folder
from rlhf_suite.rl.client_start import start_client
from rlhf_suite.run_folders.run_folder import RunFolder
from rlhf_suite.serving.http_server import Guard, Server, address_of, listen, server_of
from rlhf_suite.tasks.warm_start import with_warm_starts
from rlhf_suite.tracking.console import show_line
from rlhf_suite.tracking.journal import Journal
from rlhf_suite.tracking.metrics import read_rows
from rlhf_suite.train_server.jobs import Jobs
from rlhf_suite.train_server.ledgers import Ledgers
from rlhf_suite.train_server.models import Models
from rlhf_suite.train_server.routes import make_app
from rlhf_suite.train_server.sampling import Engines
from rlhf_suite.train_server.service import Service
from rlhf_suite.train_server.steps import Steps

if TYPE_CHECKING:
    import socket

    from fastapi import FastAPI


def run(config: Run, folder: Path, plan: Plan) -> dict[str, float]:
    """Serve until a signal asks to stop. Return the optimiser steps and the requests for samples.

    The file `server.json` in `folder` has the address and the process id.

    Raises:
        UserError: the address is in use, or the token is missing or one that clients refuse.
        RunError: a rank or an engine died.
    """
    keep_freed_memory()
    token = read_token(config)
    listener = listen(config.serve)
    record = RunFolder(folder)
    with ExitStack() as stack:
        stack.enter_context(closing(listener))
        journal = stack.enter_context(closing(Journal(config.logger, record, config.task)))
        plan = with_warm_starts(plan, config.data.prompt_dataset)
        started = start_client(config, plan, record, stack, has_prompts=False)
        # A server that was killed had perhaps written a step's row, and not yet its number.
        number = max([record.status()["last_step"], *(int(row["step"]) for row in read_rows(record.metrics)[-1:])])
        ledgers = Ledgers(record.rollouts, started.tokenizer, config.serve.rollouts_mb, number)
        steps = stack.enter_context(closing(Steps(journal, stack.enter_context(closing(ledgers)), number)))
        models = Models(started, steps)
        path = model_folder(plan.models[ACTOR].path, "actor.model_name_or_path")
        base = str(config.actor.model_name_or_path), path
        url = address_of(listener)
        write_json(folder / "server.json", {"url": url, "pid": os.getpid(), "model": base[0], "tokenizer": path})
        show_line(f"serving the training of {base[0]} at {url} (Ctrl-C ends it)")
        requests = serve(models, Engines(started), base, listener, token)
        return {"serve/steps": float(steps.number), "serve/samples": float(requests)}


def serve(models: Models, engines: Engines, base: tuple[str, str], listener: socket.socket, token: str | None) -> int:
    """Answer requests until a signal asks to stop; return how many asked for samples.

    Raises:
        RunError: what the models run on has failed.
    """
    failures: list[RunError] = []
    server: Server | None = None

    def fail(error: RunError) -> None:
        failures.append(error)
        if server is not None:
            server.should_exit = True

    jobs = Jobs(models, fail, models.steps.clock)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(jobs.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = make_app(Service(models, engines, jobs, base), lifespan, int(models.run.serve.max_request_mb * 2**20))
    server = server_of(Guard(app, token))
    server.run(sockets=[listener])
    if failures:
        raise failures[0]
    return engines.requests
