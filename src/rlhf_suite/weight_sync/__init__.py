"""Weight sync: sending the trainer's weights to the rollout engines, and verifying that they arrived.

Read `digests.py` first: it defines what trainer and engine compare. `sender.py` is the trainer's side and `receiver.py`
the engine's; `read_back.py` reads the loaded weights out of a vLLM model, and `cuda_ipc.py` shares GPU memory.
"""
