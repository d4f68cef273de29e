"""Compiles `src/kvatlas/cpu/native/kernels.c` when the package is built or installed, with the compiler of `ziglang`.

An editable install gets the libraries of this machine, a wheel those of all targets. Where compiling fails the package
is built without: it then computes with torch, and says so.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Library: target and processor of the compiler. AVX-512 in full width: halves would leave half of the registers.
TARGETS = {
    "linux-x86-64-v3.so": ("x86_64-linux-gnu", "x86_64_v3"),
    "linux-x86-64-v4.so": ("x86_64-linux-gnu", "x86_64_v4-prefer_256_bit"),
    "linux-aarch64.so": ("aarch64-linux-gnu", "generic"),
    "darwin-aarch64.dylib": ("aarch64-macos", "apple_m1"),
    "windows-x86-64-v3.dll": ("x86_64-windows-gnu", "x86_64_v3"),
}
#: Contraction is off: the source says where multiply-adds are fused, so that every target computes the same bits.
FLAGS = [
    "-O3",
    "-std=gnu11",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-ffreestanding",
    "-nostdlib",
    "-shared",
    "-fPIC",
    "-g0",
]


class KernelsHook(BuildHookInterface):
    """Puts the libraries into `src/kvatlas/cpu/native/lib`, from where wheels take them as artifacts."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        room = Path(self.root, "src", "kvatlas", "cpu", "native")
        names = [name for name in TARGETS if version != "editable" or _is_host(name)]
        with ThreadPoolExecutor(2) as pool:
            faults = [fault for fault in pool.map(lambda name: compile_kernels(room, name), names) if fault]
        for fault in faults:
            self.app.display_warning(f"native CPU kernels: {fault}; kvatlas will compute with torch there")


class ReadmeHook(MetadataHookInterface):
    """README.md as the package's description, its links absolute: a package index shows it without the other files."""

    def update(self, metadata: dict[str, Any]) -> None:
        repository, version = metadata["urls"]["Repository"], metadata["version"]

        def absolute(link: re.Match[str]) -> str:
            kind = "raw" if link["image"] else "blob"
            return f"{link['image']}{link['text']}({repository}/{kind}/v{version}/{link['target']})"

        text = Path(self.root, "README.md").read_text("utf-8")
        relative = r"(?P<image>!?)(?P<text>\[[^\]]*\])\((?![a-z]+:|#)(?P<target>[^)]+)\)"
        metadata["readme"] = {"content-type": "text/markdown", "text": re.sub(relative, absolute, text)}


def compile_kernels(room: Path, name: str) -> str | None:
    """Make one library; why it could not be made."""
    target, processor = TARGETS[name]
    command = [sys.executable, "-m", "ziglang", "cc", "-target", target, f"-mcpu={processor}", *FLAGS]
    if name.endswith(".dll"):
        command.append("-mno-stack-arg-probe")
    folder = room / "lib"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        command += [str(room / "kernels.c"), "-o", str(Path(work, name))]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{name}: {error}"
        if done.returncode:
            return f"{name}: {done.stderr.strip() or 'the compiler failed'}"
        # Replaced, never overwritten: a running process may have the old library in memory.
        Path(work, name).replace(folder / name)
    return None


def _is_host(name: str) -> bool:
    machine = {"amd64": "x86-64", "x86_64": "x86-64", "arm64": "aarch64"}.get(platform.machine().lower(), "aarch64")
    return name.startswith(f"{platform.system().lower()}-{machine}")
