"""Fake tensors on `cuda:0` where there is no GPU."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

DEVICE = torch.device("cuda:0")
#: Numbers of device types in torch (c10/core/DeviceType.h).
CUDA, META = 1, 14


@contextmanager
def without_cuda() -> Iterator[None]:
    """Provide what fake tensors need without a GPU: a guard of devices, and tensors that are made on the host first.

    Meta tensors have a guard that does nothing; that of a build with CUDA asks for a driver. Devices must be named with
    their number.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 32).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guard, lifted = guards[CUDA], torch._C._only_lift_cpu_tensors()
    guards[CUDA] = guards[META]
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        guards[CUDA] = guard
        torch._C._set_only_lift_cpu_tensors(lifted)
