"""The calls of the protocol: each takes the JSON object of a request and returns that of its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rlhf_suite.errors import UserError
from rlhf_suite.serving.http_server import BadRequest
from rlhf_suite.train_server.bodies import Body, optional_text, table, text, whole
from rlhf_suite.train_server.jobs import Answer, Job, Jobs
from rlhf_suite.train_server.ledgers import Drawn
from rlhf_suite.train_server.losses import named_loss
from rlhf_suite.train_server.messages import Pass, output_bytes, samples_bytes, to_batch
from rlhf_suite.train_server.models import INITIAL, Models, adam_of
from rlhf_suite.train_server.sampling import Engines, SampleRequest
from rlhf_suite.train_server.states import LATEST, SAMPLERS, SCHEME, STATES, address_of, check_name

SILENT_S = 300.0  # without a request or a heartbeat, after which models of a client are unloaded for those of others
POLL_S = 20.0  # that a request for an answer waits for it, before the client asks again
PENDING = {"type": "try_again", "queue_state": "active"}


class NotFound(ValueError):
    """What is asked for is not here."""


class Sessions:
    """The clients of a server, and when each was last heard of. Names of models, of sampling sessions and of requests
    begin with that of their session."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.heard = now, dict[str, float]()

    def begin(self) -> str:
        """Return the name of a new session."""
        session = str(uuid.uuid4())
        self.heard[session] = self.now()
        return session

    def hear_of(self, name: str) -> bool:
        """Take note that a client is there; return whether its session is known."""
        session = name.partition(":")[0]
        if session in self.heard:
            self.heard[session] = self.now()
        return session in self.heard

    def is_left(self, model: str) -> bool:
        """Return whether the client of a model has asked for nothing for so long that it must have ended."""
        return self.now() - self.heard.get(model.partition(":")[0], -SILENT_S) >= SILENT_S


class Service:
    """The sessions and sampling sessions of a server, and its calls. `base` has the names of the model: that of the
    flag, and its folder."""

    def __init__(self, models: Models, engines: Engines, jobs: Jobs, base: tuple[str, str]) -> None:
        self.models, self.engines, self.jobs, self.base = models, engines, jobs, base
        self.sessions = Sessions()
        self.samplers: dict[str, str] = {}  # the weights of each sampling session
        self.clones = 0
        self.run = models.run

    def calls(self) -> dict[str, Callable[[Body], Awaitable[Answer]]]:
        """Return the calls by their paths below /api/v1/."""
        names = (
            *("client/config", "client/dynamic_config", "create_session", "session_heartbeat", "telemetry"),
            *("create_model", "unload_model", "get_info", "weights_info", "optim_step", "asample", "retrieve_future"),
            *("save_weights", "load_weights", "save_weights_for_sampler", "create_sampling_session"),
            *("join_sampling_session", "cancel_future"),
        )
        return {name: getattr(self, name.replace("/", "_")) for name in names}

    async def client_config(self, body: Body) -> Answer:
        """Return what clients need to know of the server: requests are not compressed, answers are asked for singly."""
        return {"pjwt_auth_enabled": False, "parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": False}

    async def client_dynamic_config(self, body: Body) -> Answer:
        return {"refresh_interval_sec": 3600}

    async def telemetry(self, body: Body) -> Answer:
        """Accept what clients tell about themselves, and drop it."""
        return {"status": "accepted"}

    async def capabilities(self) -> Answer:
        """Return the models that a client may name, all of which are the one of this server."""
        longest = self.run.data.max_len
        common = {"max_context_length": longest, "trainable": True, "sampleable": True}
        return {"supported_models": [{"model_name": name, **common} for name in dict.fromkeys(self.base)]}

    async def create_session(self, body: Body) -> Answer:
        return {"type": "create_session", "session_id": self.sessions.begin()}

    async def session_heartbeat(self, body: Body) -> Answer:
        self.check_session(body)
        return {"type": "session_heartbeat"}

    async def cancel_future(self, body: Body) -> Answer:
        """Take note that nobody waits for samples any more; they are drawn nevertheless."""
        return {}

    def check_session(self, body: Body) -> str:
        """Return the session of a request."""
        session = text(body, "session_id")
        if not self.sessions.hear_of(session):
            raise NotFound(f"there is no session {session!r:.100}. Sessions end with the server: make a new client")
        return session

    def check_base(self, name: object) -> None:
        """Refuse another model than that of the server."""
        if name not in self.base:
            raise BadRequest(
                f"base_model={name!r:.200}: this server trains {self.base[0]}. Name it, or its folder {self.base[1]}"
            )

    async def create_model(self, body: Body) -> Answer:
        """Make a model; the answer to its future has its id."""
        name = f"{self.check_session(body)}:train:{whole(body, 'model_seq_id')}"
        self.check_base(body.get("base_model"))
        self.check_adapter(None if body.get("lora_config") is None else table(body, "lora_config"))
        if (kind := table(body, "optimizer_config").get("type", "adamw")) != "adamw":
            raise BadRequest(f"optimizer_config: {kind!r:.40} is not here. This server trains by adamw")

        async def work() -> Answer:
            await self.jobs.in_thread(lambda: self.models.create(name, self.sessions.is_left))
            return {"model_id": name, "type": "create_model"}

        return self.future(self.jobs.add(Job(f"{name}:0", work, name, phase="create_model")))

    def check_adapter(self, given: Body | None) -> None:
        """Refuse adapters of another rank than those of the server."""
        rank = self.run.ds.lora.rank
        asked = 0 if given is None else given.get("rank")
        if asked != rank:
            has = f"adapters of rank {rank}" if rank else "all weights"
            raise BadRequest(
                f"lora_config: rank={asked!r:.40}, but this server trains {has} (ds.lora.rank={rank}). Ask for it, "
                "or start the server with another ds.lora.rank"
            )

    async def unload_model(self, body: Body) -> Answer:
        name = text(body, "model_id")

        async def work() -> Answer:
            await self.jobs.in_thread(lambda: self.models.unload(name))
            return {"model_id": name, "type": "unload_model"}

        return self.future(self.jobs.add(Job(f"{name}:unload", work, name, phase="unload_model")))

    async def get_info(self, body: Body) -> Answer:
        name = text(body, "model_id")
        self.models.model(name)
        rank = self.run.ds.lora.rank
        return {
            "type": "get_info",
            "model_id": name,
            "model_name": self.base[0],
            "model_data": {"model_name": self.base[0], "tokenizer_id": self.base[1]},
            "is_lora": rank > 0,
            "lora_rank": rank,
        }

    async def weights_info(self, body: Body) -> Answer:
        """Return what a state on disk is of; its address is checked."""
        address = text(body, "tinker_path")
        self.models.states.find(address, SAMPLERS if f"/{SAMPLERS}/" in address else STATES)
        rank = self.run.ds.lora.rank
        return {"base_model": self.base[0], "is_lora": rank > 0, "lora_rank": rank}

    async def forward_backward(self, content: bytes) -> Answer:
        """Compute a loss, and add its gradient unless the request asks for the forward pass alone."""
        asked = Pass.of(content)

        async def work() -> Answer:
            loss = named_loss(asked.loss_fn)
            batch = to_batch(asked, loss, len(self.models.tokenizer), self.run.data.max_len)
            request = loss.request(asked.settings)
            output = await self.jobs.in_thread(
                lambda: self.models.compute(asked.model_id, batch, request, backward=not asked.forward_only)
            )
            return output_bytes(output.log_probs, {"loss:sum": output.loss_sum})

        return self.in_order("forward_backward", asked.model_id, asked.seq_id, work)

    def refuse(self, beginning: bytes, reason: str) -> None:
        """Fail the request of a pass of which only the beginning was read, in its turn: later ones wait for it."""
        name, seq = Pass.whose(beginning)

        async def work() -> Answer:
            raise BadRequest(reason)

        with suppress(BadRequest):  # nobody's request
            self.in_order("forward_backward", name, seq, work)

    async def optim_step(self, body: Body) -> Answer:
        name = text(body, "model_id")

        async def work() -> Answer:
            adam = adam_of(table(body, "adam_params") or table(body, "optimizer_params"))
            metrics = await self.jobs.in_thread(lambda: self.models.update(name, adam))
            return {
                "metrics": {key.removeprefix("train/").removeprefix("actor_"): value for key, value in metrics.items()}
            }

        return self.in_order("optim_step", name, body.get("seq_id"), work)

    async def save_weights(self, body: Body) -> Answer:
        name, overwrite = text(body, "model_id"), body.get("overwrite") is True

        async def work() -> Answer:
            state = check_name(optional_text(body, "path") or f"step-{uuid.uuid4().hex[:8]}")
            address = await self.jobs.in_thread(lambda: self.models.save(name, state, overwrite=overwrite))
            return {"path": address, "type": "save_weights"}

        return self.in_order("save_state", name, body.get("seq_id"), work)

    async def load_weights(self, body: Body) -> Answer:
        """Have a model go on from a state on disk; with a session in place of a model it is a new one."""
        address, with_optimizer = text(body, "path"), body.get("optimizer") is True
        is_new = body.get("session_id") is not None
        name = f"{self.check_session(body)}:train:{whole(body, 'model_seq_id')}" if is_new else text(body, "model_id")

        def load() -> None:
            self.models.states.find(address, STATES)
            if is_new:
                self.models.create(name, self.sessions.is_left)
            try:
                self.models.load(name, address, with_optimizer=with_optimizer)
            except (BadRequest, UserError):  # UserError: the state is of other flags or of another model
                if is_new:
                    self.models.unload(name)
                raise

        async def work() -> Answer:
            await self.jobs.in_thread(load)
            return {"model_id": name, "path": address, "type": "load_weights"}

        if is_new:
            return self.future(self.jobs.add(Job(f"{name}:0", work, name, phase="load_state")))
        return self.in_order("load_state", name, body.get("seq_id"), work)

    async def save_weights_for_sampler(self, body: Body) -> Answer:
        """Bring weights to the engines. With a name they are kept on disk too; without one they have a session."""
        name, state = text(body, "model_id"), optional_text(body, "path")
        session = f"{name}:sample:{body.get('sampling_session_seq_id', uuid.uuid4().hex[:8])}"

        async def work() -> Answer:
            if body.get("kind", "snapshot") != "snapshot":
                problem = "kind=inflight changes the weights of unfinished samples, which this server does not support"
                raise BadRequest(f"save_weights_for_sampler: {problem}. Use kind=snapshot")
            address = session if state is None else address_of(name, SAMPLERS, state)
            await self.jobs.in_thread(lambda: self.models.snapshot(name, address, keeps=state is not None))
            if state is not None:
                return {"path": address, "type": "save_weights_for_sampler"}
            self.samplers[session] = address
            return {"sampling_session_id": session, "type": "save_weights_for_sampler"}

        return self.in_order("weight_sync", name, body.get("seq_id"), work, changes_engines=True)

    async def create_sampling_session(self, body: Body) -> Answer:
        """Return a session that samples from weights that were saved for it, or from the model without adapters."""
        session = f"{self.check_session(body)}:sample:{whole(body, 'sampling_session_seq_id')}"
        address = optional_text(body, "model_path")
        if address is None:
            self.check_base(body.get("base_model"))
        elif address not in self.models.snapshots:
            self.models.states.find(address, SAMPLERS)
        self.samplers[session] = INITIAL if address is None else address
        return {"type": "create_sampling_session", "sampling_session_id": session}

    async def join_sampling_session(self, body: Body) -> Answer:
        self.weights_of(body)
        self.clones += 1
        return {"type": "join_sampling_session", "client_counter": self.clones}

    def weights_of(self, body: Body) -> str:
        """Return the weights that a request samples from."""
        session = optional_text(body, "sampling_session_id")
        if session is None:
            return optional_text(body, "model_path") or INITIAL
        if session not in self.samplers:
            raise NotFound(
                f"there is no sampling session {session!r:.200}. Sessions end with the server: make a new client"
            )
        return self.samplers[session]

    async def sampler(self, session: str) -> Answer:
        """Return what a sampling session samples from."""
        weights = self.weights_of({"sampling_session_id": session})
        path = weights if weights.startswith(SCHEME) else None
        return {"sampler_id": session, "base_model": self.base[0], "model_path": path}

    async def asample(self, body: Body) -> Answer:
        """Draw samples of a prompt, and compute the log-probs of its tokens if they are asked for."""
        weights, asked = self.weights_of(body), SampleRequest.of(body)
        asked.settings(())
        self.sessions.hear_of(str(body.get("sampling_session_id")))
        number = f"{body.get('sampling_session_id', INITIAL)}:{body.get('seq_id', uuid.uuid4().hex)}"
        names = [f"{number}:{n}" for n in range(asked.count)]  # by which a client says which samples it trains on

        async def work() -> Answer:
            ledgers = await self.engines.sample(asked)
            loop, drawn = asyncio.get_running_loop(), Drawn(ledgers, names, weights)
            await loop.run_in_executor(None, self.models.steps.ledgers.add, drawn)
            scores = await loop.run_in_executor(None, self.engines.score_prompt, asked)
            return samples_bytes(ledgers, scores)

        job = self.jobs.add(Job(number, work, weights=weights))
        return {"request_id": job.number, "sample_sequence_ids": names}

    def in_order(
        self,
        phase: str,
        name: str,
        seq: object,
        work: Callable[[], Awaitable[Answer]],
        *,
        changes_engines: bool = False,
    ) -> Answer:
        """Add a request of a model, whose time counts for a phase, and return its future. What is wrong with it is the
        answer to its future, since the next request waits for this number."""
        self.sessions.hear_of(name)
        self.models.model(name)
        if isinstance(seq, bool) or not isinstance(seq, int) or seq < 1:
            raise BadRequest(f"seq_id={seq!r:.40} is not the number of a request, from 1")
        return self.future(self.jobs.add_in_order(Job(f"{name}:{seq}", work, name, "", changes_engines, phase), seq))

    def future(self, job: Job) -> Answer:
        """Return the future of a request, by which its answer is fetched."""
        return {"request_id": job.number, "model_id": job.model or None}

    async def retrieve_future(self, body: Body) -> Answer:
        """Return the answer to a request, once it is there; PENDING if that takes longer than a request may wait."""
        number = text(body, "request_id")
        self.sessions.hear_of(number)
        try:
            answer = await self.jobs.fetch(number, POLL_S)
        except KeyError:
            raise NotFound(
                f"there is no request {number!r:.200}, or its answer is no longer kept. Requests end with the server; "
                f"what a model was after its last optimiser step is at {SCHEME}<model>/{STATES}/{LATEST}"
            ) from None
        return PENDING | {"request_id": number} if answer is None else answer
