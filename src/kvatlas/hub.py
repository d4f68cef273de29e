"""Files of the Hugging Face hub, from the cache or downloaded. `HF_HUB_OFFLINE=1` switches downloads off."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, reason

#: Seconds to wait for an answer of the hub.
ANSWER = 10.0


@dataclass(frozen=True)
class Repository:
    """One repository on the hub: `kind` is "model" or "dataset"; an empty `cache` is the default cache folder."""

    id: str
    kind: str = "model"
    revision: str = ""
    cache: str = ""

    def __str__(self) -> str:
        noun = "model" if self.kind == "model" else "data set"
        return f"{noun} {self.id!r}" + (f" at revision {self.revision!r}" if self.revision else "")

    def files(self) -> dict[str, str]:
        """Return the files of the revision on the hub with their SHA-256 ("" for files without one)."""
        from huggingface_hub import HfApi

        info = _ask_hub(self, lambda: HfApi().repo_info(**self._where(), files_metadata=True, timeout=ANSWER))
        return {file.rfilename: (file.lfs.sha256 if file.lfs else "") for file in info.siblings or []}

    def cached(self) -> Path | None:
        """Return the cache folder of the revision, which may be incomplete, or None."""
        try:
            return self._snapshot(local_files_only=True)
        except Exception:
            return None

    def folder(self, patterns: Sequence[str], *, show: bool = False) -> Path:
        """Return the folder with the files of these patterns; missing ones are downloaded, `show` prints progress."""
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, logging

        logging.set_verbosity_error()
        (enable_progress_bars if show else disable_progress_bars)()
        options: dict[str, Any] = {"allow_patterns": list(patterns), "etag_timeout": ANSWER, "max_workers": 4}
        return Path(_ask_hub(self, lambda: self._snapshot(**options)))

    def _snapshot(self, **options: Any) -> Path:
        from huggingface_hub import snapshot_download

        cache = Path(self.cache).expanduser() if self.cache else None
        return Path(snapshot_download(**self._where(), cache_dir=cache, **options))

    def _where(self) -> dict[str, Any]:
        return {"repo_id": self.id, "repo_type": self.kind, "revision": self.revision or None}


def is_id(text: str) -> bool:
    """Return True if a text has the form of a repository id, OWNER/NAME."""
    return re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", text) is not None


def _ask_hub(repository: Repository, ask: Any) -> Any:
    """Return the answer of the hub; KvatlasError if it cannot be reached or refuses."""
    from huggingface_hub import constants, errors

    try:
        return ask()
    except Exception as error:
        hub = constants.ENDPOINT
        local = "folder" if repository.kind == "model" else "file, as NAME@FILE"
        why = "HF_HUB_OFFLINE switches downloads off" if constants.HF_HUB_OFFLINE else f"{hub} cannot be reached"

        # A gated repository is a kind of one that is not found, and both are answers over HTTP.
        sentences = {
            errors.GatedRepoError: f"is gated: accept its terms on {hub} and log in (hf auth login), or name a local "
            "copy",
            errors.RevisionNotFoundError: f"is not on {hub}: there is no such revision",
            errors.RepositoryNotFoundError: f"is not on {hub}, or is private and you are not logged in",
            errors.HfHubHTTPError: f"could not be fetched ({reason(error)})",
            errors.LocalEntryNotFoundError: f"is not in the cache, and {why}; name a local {local}",
            errors.OfflineModeIsEnabled: f"is not in the cache, and {why}; name a local {local}",
            # A full disk, a cache that cannot be written, a fault of the client.
            Exception: f"could not be fetched ({reason(error)})",
        }
        if type(error).__module__.startswith("http"):
            # The client's errors of a connection are those of its HTTP library, of which there are several.
            kind: type[Exception] = errors.LocalEntryNotFoundError
        else:
            kind = next(kind for kind in sentences if isinstance(error, kind))
        sentence = sentences[kind]
        raise KvatlasError(f"The {repository} {sentence}.") from error
