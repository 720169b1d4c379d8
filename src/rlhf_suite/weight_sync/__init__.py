"""Weight sync: sending the trainer's weights to the rollout engines, and verifying that they arrived.

Read `digests.py` first: it defines what trainer and engine compare. `sender.py` is the trainer's side and `receiver.py`
the engine's; `loads.py` records where vLLM puts each tensor, `read_back.py` reads the weights out of its model, and
`cuda_ipc.py` shares GPU memory.
"""
