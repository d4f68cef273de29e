"""Files that are made for one model and lie in its folder: heads, statistics. They are read once for each content."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from kvatlas.core import KvatlasError, reason
from kvatlas.models import ModelHandle
from kvatlas.models.weights import sha256

if TYPE_CHECKING:
    from kvatlas.policies.base import Policy

T = TypeVar("T")


def content_of(file: Path) -> str:
    """SHA-256 of a file, read again once its time, size or inode is another one."""
    try:
        status = file.stat()
        return _content_of(file, status.st_mtime_ns, status.st_size, status.st_ino)
    except OSError as error:
        raise KvatlasError(f"The file {str(file)!r} cannot be read ({reason(error)}).") from error


@lru_cache(maxsize=64)
def _content_of(file: Path, *_stamp: int) -> str:
    return sha256(file)


def first_content(policy: Policy, file: Path) -> str:
    """The content that a file had when the policy first used it: that is the one in its run key."""
    contents: dict[Path, str] = vars(policy).setdefault("_contents", {})
    if file not in contents:
        contents[file] = content_of(file)
    return contents[file]


def by_content(load: Callable[[str, str], T]) -> Callable[..., T]:
    """Cache what `load(file, device)` reads by the content of the file.

    The result takes the `content` that is meant as a third argument; KvatlasError if the file has another one by then.
    """

    @lru_cache(maxsize=8)
    def cached(file: str, device: str, content: str) -> T:
        if content_of(Path(file)) != content:
            raise KvatlasError(f"The file {file!r} was replaced while it was in use; start again.")
        return load(file, device)

    @wraps(load)
    def loaded(file: str, device: str = "cpu", content: str = "") -> T:
        return cached(file, device, content or content_of(Path(file)))

    return loaded


def beside(model: ModelHandle, name: str) -> Path:
    """Where a file that was made for a model's weights lies: with its adapter, else with its weights."""
    return (model.adapter.folder if model.options.adapter else model.folder) / name


def check_made_with(file: Path, model: ModelHandle, parameter: str) -> None:
    """Raise KvatlasError if a file in the model's folder says that it was made with other weights.

    One that `parameter` names may be tried on any; one that is found by itself must not mean nothing unnoticed.
    """
    from safetensors import safe_open

    with safe_open(file, framework="pt") as content:
        weights = (content.metadata() or {}).get("model_weights")
    if weights not in (None, model.weights_digest) and weights != model.files_digest:
        raise KvatlasError(
            f"The file {str(file)!r} was made with other weights than those of the model {model.name!r}; make it anew, "
            f"or name it with the parameter {parameter} to use it all the same."
        )
