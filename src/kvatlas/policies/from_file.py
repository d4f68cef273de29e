"""Policies of files: permission for FILE.py, its loading, and the code that decides its choices.

A run, a log or a request may name any file, and loading a file runs its code. So only files that the user named, or
allowed by `--allow-code`, are loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from kvatlas.core import KvatlasError

#: The files whose code may run in this process.
_permitted: set[Path] = set()


def permit_file(file: Path) -> None:
    """Allow a file to be loaded in this process: the user named it, or allows the code of a run."""
    _permitted.add(file.resolve())


def load_policy_file(file: str) -> tuple[ModuleType, Mapping[Path, str]]:
    """Run a Python file once; return its module, and the digests of its code by path, its own first.

    Raises KvatlasError if it is no Python file or may not be run, and whatever its code raises.
    """
    if Path(file).resolve() not in _permitted:
        raise KvatlasError(
            f"A run or another file names a policy that is the code of the file {file!r}; if you trust that file add "
            "--allow-code, or name the file yourself (in Python: allow_code=True, kvatlas.policies.permit)."
        )
    # The folder of the process may have changed since another file of this name was loaded.
    return run_policy_file(Path(file).absolute())


@cache
def run_policy_file(file: Path) -> tuple[ModuleType, Mapping[Path, str]]:
    """Run a Python file once, as `load_policy_file` does."""
    spec = spec_from_file_location(f"kvatlas_policy_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise KvatlasError(f"{str(file)!r} is not a Python file.")

    # The file, and the modules of its folder that it imports, also inside functions and by other modules: modules
    # elsewhere belong to packages, which have versions.
    finder = ModuleFinder([str(file.parent)], excludes=["kvatlas"])
    finder.run_script(str(file))
    imported = (getattr(module, "__file__", None) for module in finder.modules.values())
    paths = [file, *sorted({Path(path) for path in imported if path} - {file})]
    digests = {path: _code_digest(path) for path in paths}

    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, digests


def code_of(file: str) -> dict[str, Any]:
    """Return digests of a loaded file, and of the modules of its own folder that it imports: part of the run key.

    Raises KvatlasError if one of them was changed after it was loaded.
    """
    digests = load_policy_file(file)[1]
    for path, loaded in digests.items():
        if _code_digest(path) != loaded:
            raise KvatlasError(f"The file {str(path)!r} of a policy was changed after it was loaded; start again.")
    folder = Path(file).absolute().parent
    modules = {path.relative_to(folder).as_posix(): content for path, content in digests.items()}
    code = {"code": modules.pop(Path(file).name)}
    return {**code, "modules": modules} if modules else code


def _code_digest(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise KvatlasError(f"The file {str(path)!r} of a policy cannot be read ({error}).") from error
