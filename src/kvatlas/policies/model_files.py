"""Files that belong to one model and lie in the subfolder `kvatlas` of its folder: heads, statistics.

Each content is read once.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from kvatlas.core import KvatlasError, refusal
from kvatlas.core.basics import holds
from kvatlas.models import ModelHandle
from kvatlas.models.weights import ADAPTER_FILES, SUBFOLDER, sha256
from kvatlas.policies.contract import CompressingPolicy

T = TypeVar("T")


class FilePolicy(CompressingPolicy):
    """A policy that needs a file of the model: the one in its parameter `file_parameter`, else `file_name`."""

    file_parameter: ClassVar[str]
    file_name: ClassVar[str]
    #: The key of the file's content in the identity, and its description in an error sentence.
    file_key: ClassVar[str]
    file_about: ClassVar[str]

    def file(self, model: ModelHandle) -> Path:
        address = getattr(self, self.file_parameter)
        return Path(address).expanduser() if address else beside(model, self.file_name)

    def check_file(self, file: Path, model: ModelHandle) -> None:
        """Raise KvatlasError if the file does not fit the model."""

    def check(self, model: ModelHandle) -> None:
        file = self.file(model)
        if not file.is_file():
            raise KvatlasError(
                f"The policy {self.setting_name!r} needs {self.file_about} for the model {model.name!r}: there is no "
                f"file {str(file)!r}; name one with the parameter {self.file_parameter}."
            )
        self.check_file(file, model)
        # A file that the user names may be tried on any model; one from the folder must belong to the weights.
        if not getattr(self, self.file_parameter):
            from safetensors import safe_open

            with safe_open(file, framework="pt") as content:
                weights = (content.metadata() or {}).get("model_weights")
            if weights not in (None, model.weights_digest) and weights != model.hash_files():
                raise KvatlasError(
                    f"The file {str(file)!r} was made with other weights than those of the model {model.name!r}; make "
                    f"it anew, or name it with the parameter {self.file_parameter} to use it all the same."
                )

    def identity(self, model: ModelHandle) -> dict[str, Any]:
        return {**super().identity(model), self.file_key: self.content(self.file(model))}

    def content(self, file: Path) -> str:
        """Return the SHA-256 of a file at its first use by the policy: the one in the run key."""
        contents: dict[Path, str] = vars(self).setdefault("_contents", {})
        if file not in contents:
            contents[file] = content_of(file)
        return contents[file]


def content_of(file: Path) -> str:
    """Return the SHA-256 of a file, read again if its size, inode or time of change has changed.

    Programs set the time of modification as they like, but not that of change.
    """
    with refusal(f"The file {str(file)!r} cannot be read", OSError):
        status = file.stat()
        return _content_of(file, status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


@lru_cache(maxsize=64)
def _content_of(file: Path, *_stamp: int) -> str:
    return sha256(file)


def by_content(load: Callable[[str, str], T]) -> Callable[..., T]:
    """Cache the results of `load(file, device)` by the content of the file.

    The cached function takes the expected `content` as a third argument, and raises KvatlasError for another one.
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
    """Return the path of a file of a model's weights, in the subfolder of its adapter's folder or its own.

    A file that lies in that folder itself, where earlier versions wrote it, is found if the subfolder has none.
    """
    folder = model.adapter.folder if model.options.adapter else model.folder
    earlier = folder / name
    path = folder / SUBFOLDER / name
    return earlier if earlier.is_file() and not path.is_file() else path


def path_to_write(out: Path) -> Path:
    """Return the place for a file that is written into a model's folder: in its subfolder, which is made.

    Raises KvatlasError for a file that is there and is not kvatlas's own.
    """
    path = out
    if any((out.parent / name).is_file() for name in ("config.json", ADAPTER_FILES[0])):
        path = out.parent / SUBFOLDER / out.name
        path.parent.mkdir(exist_ok=True)
    if path.is_file() and not holds(path, b"model_weights"):
        raise KvatlasError(f"{str(path)!r} is there, and no file of kvatlas; name another file, or remove this one.")
    return path
