"""Files of the Hugging Face hub: from the cache where they are there, else downloaded; errors as sentences.

`HF_HUB_OFFLINE=1` forbids to ask the hub.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from kvatlas.core import KvatlasError, reason

#: Seconds to wait for an answer of the hub.
ANSWER = 10.0


@dataclass(frozen=True)
class Repository:
    """One repository on the hub: `kind` is "model" or "dataset"; `cache` is the cache folder ("" for the usual one)."""

    id: str
    kind: str = "model"
    revision: str = ""
    cache: str = ""

    def __str__(self) -> str:
        named = "model" if self.kind == "model" else "data set"
        return f"{named} {self.id!r}" + (f" at revision {self.revision!r}" if self.revision else "")

    def files(self) -> dict[str, str]:
        """All files of the revision with their SHA-256 ("" where the hub knows none), asked from the hub."""
        from huggingface_hub import HfApi

        info = _answer(self, lambda: HfApi().repo_info(**self._where(), files_metadata=True, timeout=ANSWER))
        return {file.rfilename: (file.lfs.sha256 if file.lfs else "") for file in info.siblings or []}

    def cached(self) -> Path | None:
        """The folder with what is cached of the revision, whole or not."""
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(**self._where(), **self._cache(), local_files_only=True))
        except Exception:
            return None

    def folder(self, patterns: Sequence[str], *, show: bool = False) -> Path:
        """The folder that holds the files of these patterns, downloaded where they are missing; `show` for progress."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, logging

        logging.set_verbosity_error()
        (enable_progress_bars if show else disable_progress_bars)()

        wanted: dict[str, Any] = {**self._where(), **self._cache(), "allow_patterns": list(patterns)}
        return Path(_answer(self, lambda: snapshot_download(**wanted, etag_timeout=ANSWER, max_workers=4)))

    def _where(self) -> dict[str, Any]:
        return {"repo_id": self.id, "repo_type": self.kind, "revision": self.revision or None}

    def _cache(self) -> dict[str, Any]:
        return {"cache_dir": Path(self.cache).expanduser()} if self.cache else {}


def is_id(text: str) -> bool:
    """Whether a text can be the id of a repository: OWNER/NAME."""
    return re.fullmatch(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", text) is not None


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that one of the patterns matches, sorted."""
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def _answer(repository: Repository, ask: Any) -> Any:
    """The answer of the hub; KvatlasError in one sentence if it cannot be reached or refuses."""
    from huggingface_hub import constants, errors

    try:
        return ask()
    except errors.GatedRepoError as error:
        raise KvatlasError(
            f"The {repository} is gated: accept its terms on {constants.ENDPOINT} and log in (hf auth login), or name "
            "a local copy."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise KvatlasError(f"The {repository} is not on {constants.ENDPOINT}: there is no such revision.") from error
    except errors.RepositoryNotFoundError as error:
        raise KvatlasError(
            f"The {repository} is not on {constants.ENDPOINT}, or is private and you are not logged in."
        ) from error
    except errors.HfHubHTTPError as error:
        raise KvatlasError(f"The {repository} could not be fetched ({reason(error)}).") from error
    except Exception as error:
        offline = "HF_HUB_OFFLINE forbids to fetch it"
        why = offline if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        local = "folder" if repository.kind == "model" else "file"
        raise KvatlasError(f"The {repository} is not in the cache, and {why}; name a local {local}.") from error
