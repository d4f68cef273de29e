"""Secrets of a spec are in no file but the spec."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvatlas.core import digest
from kvatlas.core.secrets import without_secrets
from kvatlas.report.app.page import write_bundle, write_report
from kvatlas.report.app.run_source import open_runs
from kvatlas.report.result import open_result
from kvatlas.results.store import FILE, Store
from tests.stats.synthetic import grid, manifest
from tests.stored import store_run

MARK = "hf_Marker0123456789"
#: A secret at each place where a spec of servers has texts.
ENTRY = {
    "serve_cmd": f"docker run -e HF_TOKEN={MARK} vllm --api-key {MARK} --max-model-len 20480",
    "stop_cmd": f"curl -H 'Authorization: Bearer {MARK}' --api-key={MARK} http://host/stop",
    "options": f'--hf-token "{MARK}" --header \'{{"api_key": "{MARK}"}}\'',
    "endpoint": f"http://user:{MARK}@gpu7:8000/v1",
    "env": {"HF_TOKEN": MARK, "AWS_SECRET_ACCESS": MARK, "DB_PASSWORD": MARK, "OPENAI_API_KEY": MARK},
    "files": {"engine.yaml": f"backend: pytorch\napi_key: {MARK}\n"},
    "token": MARK,
    "hf_token": MARK,
    "api_keys": [MARK, MARK],
    "secrets": {"name": MARK},
}
SPEC = {
    "models": [{"model": "", "name": "m", **ENTRY}],
    "reference": ENTRY,
    "settings": [{"policy": "served", **ENTRY}],
    **ENTRY,
}
#: Texts and numbers that the rules of names leave alone.
PLAIN = {
    "max_new_tokens": 4096,
    "thinking_tokens": "4096",
    "token": "$HF_TOKEN",
    "api_key": "${API_KEY}",
    "key_bits": 4,
    "use_auth_token": True,
    "tokenizer": "org/name",
    "serve_cmd": "vllm serve --api-key $KEY --tokenizer-mode auto --max-num-batched-tokens 8192 --ssl-keyfile a.pem",
    "hf_overrides": '{"sliding_window": 256, "bos_token_id": 1}',
    "prompt": "The secret: guess it. Key=unknown {question}",
    "env": {"TOKENIZERS_PARALLELISM": "false", "VLLM_USE_KEY_BITS": "4"},
}


def files_with_marker(folder: Path) -> list[str]:
    return [str(file) for file in folder.rglob("*") if file.is_file() and MARK.encode() in file.read_bytes()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    promise = manifest(grid("dynts"), benchmarks=("CHAIN6",), problems=3)
    return store_run(tmp_path / "run", replace(promise, spec={**promise.spec, **SPEC}))


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, str):
        yield value
    elif not isinstance(value, int | float | bool | None):
        for entry in value:
            yield from texts(entry)


def test_each_place_of_a_spec_is_masked() -> None:
    for text in texts(without_secrets(SPEC)):
        assert MARK not in text
        assert "***" in text or text in ("", "m", "served")


def test_what_surrounds_a_secret_stays() -> None:
    masked = without_secrets(ENTRY)
    assert masked["serve_cmd"] == "docker run -e HF_TOKEN=*** vllm --api-key *** --max-model-len 20480"
    assert masked["endpoint"] == "http://***@gpu7:8000/v1"
    assert masked["files"] == {"engine.yaml": "backend: pytorch\napi_key: ***\n"}


@pytest.mark.parametrize("name", PLAIN)
def test_counts_references_and_prompts_stay(name: str) -> None:
    assert without_secrets({name: PLAIN[name]}) == {name: PLAIN[name]}


def test_a_run_its_copy_and_its_pages_hold_no_secret(run: Path, tmp_path: Path) -> None:
    with Store.open(run) as store:
        store.copy(tmp_path / "copy")
    write_report(open_result([run]), tmp_path / "page.html")
    write_bundle(open_runs([run], {}), tmp_path / "site")
    assert "***" in next((tmp_path / "site").rglob("about.json")).read_text("utf-8")
    assert files_with_marker(tmp_path) == []


def test_a_run_of_an_earlier_version_is_masked_when_it_is_read_and_copied(run: Path, tmp_path: Path) -> None:
    with Store.create(run) as store:
        stored = {**store.manifest().to_json(), "spec": {**store.manifest().spec, **SPEC}}
        text = json.dumps(stored)
        update = "INSERT OR REPLACE INTO meta VALUES ('manifest', ?), ('manifest_digest', ?)"
        store._connection.execute(update, (text, digest(text)))
    assert files_with_marker(run) != []

    with Store.open(run) as store:
        assert MARK not in json.dumps(store.manifest().to_json())
        store.copy(tmp_path / "copy")
    assert files_with_marker(tmp_path / "copy") == []
    with Store.open(tmp_path / "copy") as copy, Store.open(run) as store:
        assert copy.manifest() == store.manifest()
    assert FILE in {file.name for file in (tmp_path / "copy").iterdir()}
