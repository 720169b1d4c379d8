"""A device without a GPU: torch's fake tensors on `cuda:0`, beside real tensors in host memory.

An operation on the device returns tensors that have a shape, a type and a device, and no numbers; one in host memory is
computed. Where the host reads a tensor of the device it gets ones, and the read is counted: a GPU would have to finish
all work before it. An operation whose result has a shape that depends on numbers of the device raises an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
MOVES = (aten._to_copy.default, aten.copy_.default)


class FakeDevice(TorchDispatchMode):
    """Runs operations on `cuda:0` without numbers. Since `count` was called: `reads` is how often the host read the
    device, `sends` how often it waited for a copy to it, and `kernels` how often each operation ran there."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = self.sends = 0
        self.kernels = Counter[str]()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def count(self) -> None:
        """Begin to count."""
        self.reads = self.sends = 0
        self.kernels = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        values = tree_leaves((args, kwargs))
        is_held = any(isinstance(value, FakeTensor) for value in values)
        if func in MOVES:
            return self._move(func, args, kwargs)
        if func is aten._local_scalar_dense.default and is_held:
            self.reads += 1
            return torch.ones((), dtype=args[0].dtype).item()
        if func in (aten._pin_memory.default, aten.pin_memory.default):
            return args[0].clone()
        if func is torch.ops.prim.device.default:
            return func(*args)
        if not is_held and all(value.type == "cpu" for value in values if isinstance(value, torch.device)):
            kwargs.pop("pin_memory", None)  # it would ask the driver for memory
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy a tensor, perhaps between the host and the device. A scalar travels with the kernel that takes it."""
        is_new = func is aten._to_copy.default
        source, target = args[0] if is_new else args[1], None if is_new else args[0]
        goes = torch.device(kwargs.get("device") or source.device) if target is None else target.device
        if source.device.type == goes.type == "cpu":
            return func(*args, **kwargs)
        if goes.type == "cpu":
            self.reads += 1
            ones = torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            return ones if target is None else target.copy_(ones)
        waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
        self.sends += source.device.type == "cpu" and waits
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation on the device; tensors of the host among its arguments are scalars, or what it copies."""

        def fake(value: Any) -> Any:
            is_real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
            return self.fake.from_tensor(value) if is_real else value

        self.kernels[str(func.overloadpacket).partition(".")[2]] += 1
        args, kwargs = tree_map(fake, (args, kwargs))
        with self.fake:
            return func(*args, **kwargs)


def read_at_once(tensor: FakeTensor) -> Any:
    """Return the numbers of a tensor as lists. Fake tensors would read one after the other."""
    return tensor.cpu().tolist()


def keep_place(parameter: torch.Tensor, moved: torch.Tensor) -> None:
    """Leave a parameter of a module where it is. `Module.to` exchanges fake parameters by `swap_tensors`, which refuses
    those that fake tensors refer to, even if they are in the right place already."""
    assert (parameter.device, parameter.dtype) == (moved.device, moved.dtype), "it is not in the right place"


@contextmanager
def fake_device() -> Iterator[FakeDevice]:
    """Have everything that this thread does on `cuda:0` within the block done without numbers."""
    FakeTensor.tolist = read_at_once
    torch.utils.swap_tensors = keep_place
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") is made in host memory and copied
    with FakeDevice() as device:
        yield device
