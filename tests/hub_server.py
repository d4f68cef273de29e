"""A small Hugging Face hub on this machine: folders as repositories, one of them gated. For the hub's real client."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import close_session, constants

from tests.web_server import answering

COMMIT = "0123456789abcdef0123456789abcdef01234567"
GATED = "owner/gated"


@contextmanager
def hub(folders: dict[str, Path]) -> Iterator[tuple[str, list[str]]]:
    """Serves `folders` by id ("owner/name"); yields the endpoint and the list of files that were fetched."""
    fetched: list[str] = []

    def reply(method: str, path: str, *_: object) -> tuple[int, Mapping[str, str], bytes]:
        parts = path.partition("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        parts = parts[1:] if parts[0] in ("models", "datasets") else parts
        id_, rest = "/".join(parts[:2]), parts[2:]
        if id_ == GATED:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if id_ not in folders:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if api:
            return 200, {}, json.dumps(info(folders[id_], id_, rest)).encode()
        file = folders[id_] / "/".join(rest[2:])
        if not file.is_file():
            return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"
        content = file.read_bytes()
        made = hashlib.sha256 if file.suffix == ".safetensors" else hashlib.sha1
        if method == "GET":
            fetched.append(file.name)
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{made(content).hexdigest()}"'}, content

    with answering(reply) as endpoint:
        yield endpoint, fetched


def info(folder: Path, id_: str, rest: list[str]) -> object:
    """Return what the API tells of a repository, or of its tree."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    if rest and rest[0] == "tree":
        return [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40} for name, path in files.items()
        ]
    siblings = []
    for name, path in files.items():
        entry: dict[str, object] = {"rfilename": name, "size": path.stat().st_size}
        if path.suffix == ".safetensors":
            sha = hashlib.sha256(path.read_bytes()).hexdigest()
            entry["lfs"] = {"sha256": sha, "size": path.stat().st_size, "pointerSize": 134}
        siblings.append(entry)
    return {"id": id_, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


def connect(monkeypatch: pytest.MonkeyPatch, endpoint: str, cache: Path) -> None:
    """Let the hub's client of this process ask this hub, with an empty cache and without a proxy."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    address = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    close_session()
