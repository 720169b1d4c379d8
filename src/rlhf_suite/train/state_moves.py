"""Moving what only an update needs, optimiser state, fp32 weights and gradients, to host memory and back
(ds.enable_sleep).

DeepSpeed 0.19 does all of it under ZeRO-2. Under ZeRO-3 it moves the states of its own FusedAdam alone, so those of
torch's AdamW, and the fp32 weights, which it moves together with them, are moved here.
"""

from __future__ import annotations

from typing import Any

import torch

HOST = torch.device("cpu")


def move_states_to_host(engine: Any, zero_stage: int | None, *, pinned: bool) -> None:
    """Move what only an update needs to host memory. The weights that a forward pass reads stay."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States
    from deepspeed.runtime.zero.offload_states import offload_optimizer_states

    moved = [States.lp_grads, States.contiguous_grad_buffer]
    if zero_stage == 3:
        for partition in engine.optimizer.fp32_partitioned_groups_flat:
            host = torch.empty_like(partition, device=HOST, pin_memory=pinned, requires_grad=False)
            partition.data = host.copy_(partition.detach())
        offload_optimizer_states(engine.optimizer.optimizer, HOST, pin_memory=pinned)
    else:
        moved += [States.optim_states, States.hp_params]
    engine.offload_states(include=moved, pin_memory=pinned)


def move_states_to_device(engine: Any, zero_stage: int | None, device: torch.device) -> None:
    """Undo `move_states_to_host`."""
    from deepspeed.runtime.zero.offload_states import reload_optimizer_states

    engine.reload_states()
    if zero_stage == 3:
        for partition in engine.optimizer.fp32_partitioned_groups_flat:
            partition.data = partition.data.to(device, copy=True)
        reload_optimizer_states(engine.optimizer.optimizer, device)
