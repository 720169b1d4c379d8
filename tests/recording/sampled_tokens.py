"""Notes what an engine samples and what a policy is trained on, in the folder RLHF_SUITE_SAMPLED, in every process of a
run; see `sitecustomize.py`.

`engine-<process>.jsonl` has a line for each piece that the core of vLLM gave out: the request, and its new tokens.
`policy-<process>.jsonl` has a line for each ledger of a micro-batch of the policy loss: its tokens and its loss mask.
"""

import importlib.abc
import importlib.util
import json
import os
import sys
from pathlib import Path

FOLDER = os.environ["RLHF_SUITE_SAMPLED"]


def note(kind, value):
    with Path(FOLDER, f"{kind}-{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(value) + "\n")


def note_sampled(module):
    """vLLM gives the tokens of a request out in pieces; requests that only score a text have log-probs of it."""
    cls, scoring = module.LLMEngine, set()
    add, start = cls.add_request, cls.__init__

    def add_request(self, request_id, prompt, params, *args, **more):
        if params.prompt_logprobs is not None:
            scoring.add(request_id)
        return add(self, request_id, prompt, params, *args, **more)

    def init(self, *args, **more):
        start(self, *args, **more)
        get_output = self.engine_core.get_output

        def get_and_note():
            outputs = get_output()
            for output in outputs.outputs:
                names = tuple(f"{name}-" for name in scoring)  # vLLM adds to them
                scores = output.request_id in scoring or output.request_id.startswith(names)
                if output.new_token_ids and not scores:
                    note("engine", [output.request_id, list(output.new_token_ids)])
            return outputs

        self.engine_core.get_output = get_and_note

    cls.add_request, cls.__init__ = add_request, init


def note_trained(module):
    cls = module.PolicyObjective
    compute = cls.loss

    def loss(self, model, batch):
        begin = 0
        for length in batch.lengths.tolist():
            end = begin + length
            note("policy", [batch.ids[begin:end].tolist(), batch.mask[begin:end].tolist()])
            begin = end
        return compute(self, model, batch)

    cls.loss = loss


PATCHES = {"vllm.v1.engine.llm_engine": note_sampled, "rlhf_suite.rl.objectives": note_trained}


class AfterImport(importlib.abc.MetaPathFinder):
    """Patches a module when it has been imported."""

    def find_spec(self, name, path, target=None):
        patch = PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterImport())
