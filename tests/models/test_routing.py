"""Routers take the routes that they are given, of their own tokens and layers, and keep their gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from families import make_typed
from rlhf_suite.config.declarations.ds import DeepSpeedConfig, LoRAConfig
from rlhf_suite.config.declarations.models import ActorConfig
from rlhf_suite.data.batch import TokenBatch, take
from rlhf_suite.models.forward import token_log_probs
from rlhf_suite.models.load import load_model
from rlhf_suite.models.prepare import make_trainable
from rlhf_suite.models.routing import routers_of

TYPES = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3", "gpt_oss")
LENGTHS, EXPERTS, TOP_K = (5, 9, 3), 4, 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            make_typed(made[kind], kind, num_hidden_layers=3, **({} if kind != "gpt_oss" else {"layer_types": None}))
        return str(made[kind])

    return get


def load(folder, packed=True, dtype="fp32"):
    return load_model(folder, head="lm", ds=DeepSpeedConfig.of("sft", param_dtype=dtype, packing_samples=packed))


def make_batch(model, seed=0) -> TokenBatch:
    """Sequences with random routes."""
    generator = torch.Generator().manual_seed(seed)
    total, layers = sum(LENGTHS), len(routers_of(model.model, model.family))
    routes = torch.rand(total, layers, EXPERTS, generator=generator).argsort(-1)[..., :TOP_K].to(torch.int8)
    ids = torch.randint(3, 250, (total,), generator=generator)
    return TokenBatch(ids, torch.tensor(LENGTHS), torch.ones(total), torch.arange(len(LENGTHS)), routes)


def own_routes(model, batch) -> torch.Tensor:
    """The choices of the routers themselves."""
    chosen = []
    hooks = [
        r.register_forward_hook(lambda m, i, o: chosen.append(o[2])) for _, r in routers_of(model.model, model.family)
    ]
    token_log_probs(model, replace(batch, routes=None))
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, 1).to(torch.int8)


def weights(router, logits, chosen):
    """The weights of chosen experts, by the formula of each family."""
    kind = type(router).__name__
    if kind.startswith("GptOss"):
        return logits.gather(-1, chosen).softmax(-1)
    scores = logits.sigmoid() if kind.startswith(("Glm", "Deepseek")) else logits.softmax(-1)
    taken = scores.gather(-1, chosen)
    if getattr(router, "norm_topk_prob", True):
        taken = taken / taken.sum(-1, keepdim=True)
    return taken * getattr(router, "routed_scaling_factor", 1.0)


def formula(folder, batch):
    """Log-probs in float64, one sequence at a time, by routers that have no choice; and the gradients of their sum."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.config._experts_implementation = "eager"
    routers = [m for m in model.modules() if type(m).__name__.endswith(("TopKRouter", "TopkRouter"))]
    log_probs = []
    for ids, routes in zip(batch.ids.split(LENGTHS), batch.routes.split(LENGTHS), strict=True):
        for number, router in enumerate(routers):

            def forward(hidden, router=router, number=number, routes=routes):
                chosen = routes[:, number].long()
                logits = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight, getattr(router, "bias", None))
                return logits, weights(router, logits, chosen), chosen

            router.forward = forward
        logits = model(ids[None]).logits[0, :-1].log_softmax(-1)
        log_probs += [torch.zeros(1, dtype=torch.float64), logits.gather(-1, ids[1:, None])[:, 0]]
    log_probs = torch.cat(log_probs)
    (-log_probs.sum()).backward()
    return log_probs.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def relative(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.notices(
    "routes are shifted by one token",
    "models/routing.py",
    "given = self.routes.experts[:, self.layer]",
    "given = self.routes.experts.roll(1, 0)[:, self.layer]",
    cases="qwen3_moe",
)
@pytest.mark.notices(
    "a router takes the routes of another layer",
    "models/routing.py",
    "given = self.routes.experts[:, self.layer]",
    "given = self.routes.experts[:, self.layer - 1]",
    cases="qwen3_moe",
)
@pytest.mark.notices(
    "the weights of replayed experts are those of other experts",
    "models/routing.py",
    "args[0].gather(-1, chosen)",
    "args[0].gather(-1, own)",
    cases="qwen3_moe",
)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", TYPES)
def test_log_probs_and_gradients_are_those_of_the_formula(folders, kind, packed):
    model = load(folders(kind), packed)
    batch = make_batch(model)
    found = token_log_probs(model, batch).log_probs
    (-found.sum()).backward()
    wanted, gradients = formula(folders(kind), batch)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    own = {name.removeprefix("model."): p.grad for name, p in model.named_parameters() if p.grad is not None}
    errors = {name: relative(own[name], gradient) for name, gradient in gradients.items()}
    assert max(errors.values()) <= 1e-4, errors


@pytest.mark.parametrize("kind", TYPES)
def test_the_own_routes_change_no_bit(folders, kind):
    model = load(folders(kind))
    batch = make_batch(model)
    with torch.no_grad():
        plain = token_log_probs(model, replace(batch, routes=None))
        own = token_log_probs(model, replace(batch, routes=own_routes(model, batch)))
        unknown = token_log_probs(model, replace(batch, routes=torch.full_like(batch.routes, -1)))
        other = token_log_probs(model, batch)
    assert plain.rerouted is None
    assert torch.equal(own.log_probs, plain.log_probs) and not own.rerouted.any()
    assert torch.equal(unknown.log_probs, plain.log_probs) and not unknown.rerouted.any()
    assert not torch.allclose(other.log_probs, plain.log_probs) and other.rerouted.any()


def test_each_sequence_has_its_own_routes_in_any_micro_batch(folders):
    model = load(folders("qwen3_moe"))
    batch = make_batch(model)
    with torch.no_grad():
        whole = token_log_probs(model, batch).log_probs.split(LENGTHS)
        for rows in ([2, 0], [1], [0, 1, 2], [2, 2, 1]):
            part = token_log_probs(model, take(batch, rows)).log_probs.split([LENGTHS[row] for row in rows])
            for row, found in zip(rows, part, strict=True):
                torch.testing.assert_close(found, whole[row], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_take_their_own_routes(folders, reentrant):
    def gradients(checkpointing):
        model = load(folders("qwen3_moe"))
        settings = ActorConfig.of(
            "ppo", gradient_checkpointing_enable=checkpointing, gradient_checkpointing_reentrant=reentrant
        )
        make_trainable(model, settings, LoRAConfig())
        batches = [make_batch(model, seed) for seed in (0, 1)]
        losses = [token_log_probs(model, batch).log_probs.sum() for batch in batches]
        for loss in losses:  # the first one when the model last saw the second
            loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain, recomputed = gradients(checkpointing=False), gradients(checkpointing=True)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, msg=name)


@pytest.mark.notices(
    "a frozen router is trained",
    "models/prepare.py",
    "        router.requires_grad_(False)",
    "        router.requires_grad_(True)",
)
@pytest.mark.parametrize("kind", TYPES)
def test_a_frozen_router_is_not_trained(folders, kind):
    model = load(folders(kind))
    make_trainable(model, ActorConfig.of("ppo", freeze_router=True), LoRAConfig())
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen and all(".mlp.gate." in name or ".mlp.router." in name or ".gate." in name for name in frozen)
