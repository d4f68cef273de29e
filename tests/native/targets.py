"""The kernels of every target that this processor runs."""

from pathlib import Path

import pytest

from kvatlas.cpu import native

ROOT = Path(__file__).parents[2]
if native.load() is None:
    pytest.skip(str(native.why_not()), allow_module_level=True)
BEST = native.load()
FILES = {path.stem: path for path in sorted((ROOT / "src/kvatlas/cpu/native/lib").glob("linux-x86-64-v*.so"))}
ALL = [BEST] + [
    native.Native(path, name)
    for name, path in FILES.items()
    if not name.endswith(BEST.target) and int(name[-1]) <= BEST.library.kvatlas_x86_level()
]
