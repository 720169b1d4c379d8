"""`Client`: the primitives of training, for loops of one's own. Each call is a part of what task=ppo does, done by the
same trainer and engines.

    with rs.Client("builtin:tiny", **{"train.max_steps": 4}) as client:
        ledgers = client.sample(prompts, 8)
        client.forward_backward([rs.Datum.of(ledger, advantages=...) for ledger in ...])
        client.optim_step()
        client.save_weights_for_sampler()
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from rlhf_suite.api.client_start import compose, start
from rlhf_suite.errors import UserError
from rlhf_suite.rl.client import TrainingClient


class Client(TrainingClient):
    """A policy that is trained, and the engines that sample from it, on a Ray cluster of its own.

    `model`, `lora_rank` and `settings` are those of `rs.run("ppo", ...)`; without a model it is that of the demo. The
    engines begin with the weights of the policy. A process has one client at a time; `close`, the end of a `with`
    block, or the end of the process ends all of it.

    Raises:
        ConfigurationError: there are mistakes in the settings; all of them are in its `problems`.
        RunError: a process of the client did not come up.
    """

    _open: ClassVar[Client | None] = None  # of this process, which has one connection to Ray

    def __init__(self, model: str | Path | None = None, lora_rank: int | None = None, **settings: Any) -> None:
        super().__init__()
        if Client._open is not None:
            raise UserError("this process has a client already, and one connection to Ray. Close that one first")
        given = {"model": model, "lora_rank": lora_rank}
        run, record, has_prompts = compose({**{k: v for k, v in given.items() if v is not None}, **settings})
        self._stack = ExitStack()
        self._stack.callback(atexit.unregister, self.close)
        atexit.register(self.close)
        Client._open = self
        try:
            self._parts = start(run, record, has_prompts, self._stack)
            self.save_weights_for_sampler()
        except BaseException as error:
            self._end(error)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    def close(self) -> None:
        """End all processes of the client. A second call does nothing."""
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """End all processes, and write into the folder how it ended."""
        self._parts = None
        if Client._open is self:
            Client._open = None
        self._stack.__exit__(None if error is None else type(error), error, None)

    @property
    def folder(self) -> Path:
        """The folder of the client, with its configuration and the logs of its processes."""
        return self._of("folder").record.path
