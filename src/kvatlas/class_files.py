"""Policies and benchmarks of files, FILE.py:CLASS: permission for a file, its loading, and its code in run keys.

A run, a log or a request may name any file, and loading a file runs its code. So only files that the user named, or
allowed by `--allow-code`, are loaded. A note in the user's own cache remembers them by path and content: another
command may load the same code, and a file that was written since, or is another one, is asked for anew.
"""

import errno
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from modulefinder import ModuleFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from kvatlas.core import KvatlasError, Measure, reason, refusal
from kvatlas.core.basics import OWN_FILE
from kvatlas.machine import cache_folder
from kvatlas.text import did_you_mean

#: The files whose code may run in this process.
_permitted: set[Path] = set()
#: Those whose code runs now, with the threads that run it.
_running: set[tuple[Path, int]] = set()
#: The absolute files of classes whose code is part of run keys.
_files: dict[type, str] = {}


def class_file(name: str) -> Path | None:
    """Return the file of a name FILE.py:CLASS or FILE.py, whose code runs when it is found; None for other names."""
    file, _ = _file_and_class(name)
    return Path(file) if file else None


def absolute_name(name: str) -> str:
    """Return FILE.py:CLASS with the absolute path of its file."""
    file, class_name = _file_and_class(name)
    return f"{Path(file).absolute()}:{class_name}" if class_name else str(Path(file).absolute())


def _file_and_class(name: str) -> tuple[str, str]:
    """Return the parts of FILE.py:CLASS; the class is empty for FILE.py, and both are for other names."""
    if name.endswith(".py"):
        return name, ""
    file, _, class_name = name.rpartition(":")
    return (file, class_name) if file.endswith(".py") else ("", "")


def permit(*names: str) -> None:
    """Allow the code of the files among these names to run: the user named them, or allowed the code of a run."""
    for name in names:
        file = class_file(name)
        if file is not None:
            _permitted.add(file.resolve())


def load_named(name: str, noun: str, fits: Callable[[Any], bool], takes_rest: bool = False) -> tuple[Any, str]:
    """Return the object that FILE.py:NAME names, and the rest of the name behind it: `12` of `FILE.py:Chain12`.

    FILE.py alone names the only object of the file that `fits`. `noun` says what the object is, for error sentences.
    Raises KvatlasError if the file may not be run or has no such object, and for a rest unless `takes_rest`.
    """
    file, wanted = _file_and_class(name)
    with refusal(f"The {noun} {name} cannot be loaded"):
        module, _ = load_file(file)
        fitting = {word: value for word, value in vars(module).items() if not _is_ours(value) and fits(value)}

    if not wanted:
        # Classes of other modules are imported.
        modules = {word: value.__module__ if isinstance(value, type) else "" for word, value in fitting.items()}
        written = [word for word, of_value in modules.items() if of_value in ("", module.__name__)]
        if len(written) != 1:
            found = f"{', '.join(written)}; name one, as {file}:{written[0]}" if written else "none"
            raise KvatlasError(
                f"The {noun} {name} cannot be loaded (expected one {noun} in the file, it has {found})."
                f"{'' if written else _other_classes(module, noun)}"
            )
        return fitting[written[0]], ""

    # A class or a function of another kind is refused by its use.
    is_named = wanted in fitting or callable(getattr(module, wanted, None))
    beginnings = [wanted] if is_named else []
    if takes_rest and not isinstance(getattr(module, wanted, None), type):
        beginnings = [word for word in fitting if wanted.startswith(word)]
    if not beginnings:
        found = ", ".join(fitting) or "none"
        raise KvatlasError(
            f"The {noun} {name} cannot be loaded (the file has no {noun} {wanted!r}; it has {found})."
            f"{did_you_mean(wanted, fitting) if fitting else _other_classes(module, noun)}"
        )
    own_name = max(beginnings, key=len)
    return getattr(module, own_name), wanted[len(own_name) :]


def _is_ours(value: object) -> bool:
    """Return True for a class of kvatlas: the base of one in a file."""
    return isinstance(value, type) and value.__module__.startswith("kvatlas.")


#: The rooms of the bases of classes in files, and where a command takes such a file.
_TAKEN = {"policies": "a policy; give it with --policy", "benchmarks": "a benchmark; give it behind a model"}


def _other_classes(module: ModuleType, noun: str) -> str:
    """Return a sentence on the first class or measure of a file that is no `noun`, or on how one is written."""
    for name, value in vars(module).items():
        if isinstance(value, Measure):
            return f" It holds the measure {name}: `kvatlas grade RUN --measure FILE.py:{name}`."
        if not isinstance(value, type) or value.__module__ != module.__name__:
            continue
        for base in value.__mro__:
            package, _, room = base.__module__.partition(".")
            if package == "kvatlas" and room.partition(".")[0] in _TAKEN:
                return f" {name} is {_TAKEN[room.partition('.')[0]]}."
        if hasattr(value, "score"):
            return f" {name} has a score; a policy has the base kvatlas.policies.CompressingPolicy, too."
    guide = "the Python API" if noun == "measure" else f"adding a {noun}"
    return f" Write one as the guide on {guide} shows."


def load_file(file: str) -> tuple[ModuleType, Mapping[Path, str]]:
    """Run a Python file once; return its module, and the digests of its code by path, its own first.

    Raises FileNotFoundError if it is not there, KvatlasError if it is no Python file or may not be run, and whatever
    its code raises.
    """
    # The folder of the process may have changed since another file of this name was loaded.
    path = Path(file).absolute()
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, "No such file, by its name from the folder of the command", str(path))
    is_permitted = path.resolve() in _permitted
    if not is_permitted and not _note_of_trust(path).exists():
        subject = f"A run or another file names a policy or a benchmark that is the code of the file {file!r}"
        if any(note.read_text() == str(path) for note in _note_of_trust(path).parent.glob("*")):
            subject += ", which was changed since you allowed it"
        raise KvatlasError(
            f"{subject}; if you trust that file add --allow-code, or name the file yourself (in Python: "
            "allow_code=True, kvatlas.policies.permit)."
        )
    loaded = run_file(path)
    if is_permitted:
        # A read-only cache remembers nothing.
        with suppress(OSError, ValueError):
            note = _note_of_trust(path)
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(str(path))
    return loaded


def _note_of_trust(file: Path) -> Path:
    """Return the file in the cache, with the path of a Python file, that stands for it and its modules as they are."""
    contents = [f"{path}\0{path.stat().st_mtime_ns}\0{content}" for path, content in _code_digests(file).items()]
    return cache_folder() / "trusted" / sha256("\n".join(contents).encode()).hexdigest()


#: Faults of dataclasses as Python says them, with the way out.
_DATACLASS_FAULTS = {
    "mutable default": "a parameter is a number, a text, true or false, and a constant stands above its class",
    "cannot inherit non-frozen dataclass": "write @dataclass(frozen=True)",
}


@cache
def run_file(file: Path) -> tuple[ModuleType, Mapping[Path, str]]:
    """Run a Python file once, as `load_file` does."""
    # Files of the same name in other folders are other modules.
    folder = sha256(str(file.parent).encode()).hexdigest()[:12]
    spec = spec_from_file_location(f"{OWN_FILE}{file.stem}_{folder}", file)
    if spec is None or spec.loader is None:
        raise KvatlasError(f"{str(file)!r} is not a Python file.")

    digests = _code_digests(file)
    running = (file, threading.get_ident())
    if running in _running:
        raise KvatlasError(
            f"The file {str(file)!r} uses itself while it is loaded, as by a sweep; write that below "
            'if __name__ == "__main__":.'
        )
    module = sys.modules[spec.name] = module_from_spec(spec)
    _running.add(running)
    try:
        # What it prints is no output of a command.
        with redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except ImportError as error:
        module_name = str(error.name).partition(".")[0]
        is_relative = error.name is None and "relative import" in str(error)
        if is_relative or (file.parent / f"{module_name}.py").exists():
            raise KvatlasError(
                f"The file {str(file)!r} imports a module of its folder ({reason(error)}); expected `import NAME`, "
                f"and the folder in PYTHONPATH: PYTHONPATH={file.parent} kvatlas ..."
            ) from error
        raise
    except (TypeError, ValueError) as error:
        fault = str(error).removesuffix(": use default_factory")
        for beginning, way_out in _DATACLASS_FAULTS.items():
            if fault.startswith(beginning):
                raise KvatlasError(f"The file {str(file)!r}: {fault}; {way_out}.") from error
        raise
    finally:
        _running.discard(running)
    return module, digests


def record_file(value: type, file: str | Path) -> None:
    """Record the file that the objects of a class come from; our own classes need none, since they have versions."""
    if not value.__module__.startswith("kvatlas."):
        _files.setdefault(value, str(Path(file).absolute()))


def recorded_file(value: type) -> str | None:
    """Return the absolute file that the objects of a class come from; None for classes of modules."""
    return _files.get(value)


def code_of(file: str) -> dict[str, Any]:
    """Return digests of a loaded file, and of the modules of its own folder that it imports: part of the run key.

    Raises KvatlasError if one of them was changed after it was loaded.
    """
    with refusal(f"The file {file!r} cannot be read"):
        digests = load_file(file)[1]
    for path, loaded in digests.items():
        if _code_digest(path) != loaded:
            raise KvatlasError(f"The file {str(path)!r} was changed after it was loaded; start again.")
    folder = Path(file).absolute().parent
    modules = {path.relative_to(folder).as_posix(): content for path, content in digests.items()}
    code = {"code": modules.pop(Path(file).name)}
    return {**code, "modules": modules} if modules else code


def _code_digests(file: Path) -> dict[Path, str]:
    """Return the digests of a file, and of the modules of its folder that it imports, also inside functions.

    Modules elsewhere belong to packages, which have versions. No code is run.
    """
    finder = ModuleFinder([str(file.parent)], excludes=["kvatlas"])
    finder.run_script(str(file))
    imported = (getattr(module, "__file__", None) for module in finder.modules.values())
    paths = [file, *sorted({Path(path) for path in imported if path} - {file})]
    return {path: _code_digest(path) for path in paths}


def _code_digest(path: Path) -> str:
    with refusal(f"The file {str(path)!r} cannot be read", OSError):
        return sha256(path.read_bytes()).hexdigest()
