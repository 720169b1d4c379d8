"""A program for the environment that has the package tinker: trains, samples, saves and loads; prints what it saw."""

import json

import tinker
from tinker import types

service = tinker.ServiceClient()
training = service.create_lora_training_client("builtin:tiny", rank=32).result()
tokens = training.get_tokenizer().encode("reverse 0123 = 3210")
size = len(tokens) - 1


def datum(weight):
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[size]),
            "weights": types.TensorData(data=[weight] * size, dtype="float32", shape=[size]),
        },
    )


def likelihood(data, log_probs):
    return -sum(own.sum() for own in log_probs), {}


losses = []
for _ in range(4):
    future = training.forward_backward([datum(1.0)], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    losses.append(future.result().metrics["loss:sum"])
plain = training.forward([datum(1.0)], "cross_entropy").result().metrics["loss:sum"]
custom = training.forward_backward_custom([datum(1.0)], likelihood).result().metrics["loss:sum"]
training.optim_step(types.AdamParams(learning_rate=1e-2)).result()

target = training.forward([datum(1.0)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
sampling = training.save_weights_and_get_sampling_client().result()
prompt = types.ModelInput.from_ints(tokens)
scores = sampling.compute_logprobs(prompt).result()
likely = sampling.sample(
    prompt, num_samples=1, sampling_params=types.SamplingParams(max_tokens=1), topk_prompt_logprobs=3,
    include_prompt_logprobs=True,
).result()  # fmt: skip
assert likely.topk_prompt_logprobs[0] is None and len(likely.topk_prompt_logprobs) == len(tokens)
assert all(row[0][1] >= own - 1e-5 for row, own in zip(likely.topk_prompt_logprobs[1:], scores[1:], strict=True))
drawn = sampling.sample(prompt, num_samples=3, sampling_params=types.SamplingParams(max_tokens=5, seed=3)).result()
assert len({sequence.sequence_id for sequence in drawn.sequences}) == 3
assert all(len(sequence.tokens) == len(sequence.logprobs) for sequence in drawn.sequences)

path = training.save_state("half-way").result().path
saved = training.forward([datum(1.0)], "cross_entropy").result().metrics["loss:sum"]
again = service.create_training_client_from_state_with_optimizer(path)
again = again.result() if hasattr(again, "result") else again
loaded = again.forward([datum(1.0)], "cross_entropy").result().metrics["loss:sum"]
gap = [abs(one - two) for one, two in zip(scores[1:], target, strict=True)]
print(json.dumps({"losses": losses, "plain": plain, "custom": custom, "gap": gap, "saved": saved, "loaded": loaded}))
