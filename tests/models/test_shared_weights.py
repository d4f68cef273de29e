"""Packed weights in a file: made once, mapped by every process after that, and the originals are not read again."""

import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvatlas.core import KvatlasError
from kvatlas.cpu import native, packing
from kvatlas.cpu.packing import PackedLinear
from kvatlas.models import ModelHandle, handle
from kvatlas.models.weights import Adapter
from tests.models.test_adapters import save_adapter, with_adapter
from tests.r1 import copied

pytestmark = pytest.mark.skipif(native.load() is None, reason="no native kernels for this machine")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of caches, and weights of any size that are shared."""
    monkeypatch.setattr(handle, "SHARED_FROM", 0)
    monkeypatch.setenv("KVATLAS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=torch.arange(9)[None], use_cache=False).logits
    return result


def loaded_alone(model: ModelHandle) -> Any:
    """Load a model with weights of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handle, "SHARED_FROM", math.inf)
        return model.load()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("packed-*.bin"))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3", "gpt_oss", "qwen3_next"])
def test_mapped_weights_compute_the_same_numbers(
    kind: str,
    random_models: dict[str, ModelHandle],
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = random_models[kind]
    expected = logits(loaded_alone(model))
    assert torch.equal(logits(model.load()), expected)
    (file,) = files(cache)
    assert f"in {file}" in capsys.readouterr().err

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the original weights were read")

    monkeypatch.setattr(native, "pack_weights", refuse)
    monkeypatch.setattr(packing, "_probe_numbers", refuse)
    monkeypatch.setattr("kvatlas.models.weights.check_finite", refuse)
    again = model.load()
    assert torch.equal(logits(again), expected)
    assert capsys.readouterr().err == ""
    tables = [module.packed.weight for module in again.modules() if isinstance(module, PackedLinear)]
    assert all(table.data_ptr() % 64 == 0 for table in tables)
    # Whoever changes weights changes those of its process alone.
    tables[0].fill_(0.0)
    assert torch.equal(logits(model.load()), expected)


@pytest.mark.parametrize(("weights", "size"), [("bfloat16", 0.75), ("int8", 0.5)])
def test_short_weights_lie_in_a_file_of_their_own(
    weights: str, size: float, random_models: dict[str, ModelHandle], cache: Path
) -> None:
    exact = random_models["llama"]
    short = replace(exact, options=replace(exact.options, weights=weights))
    expected = logits(loaded_alone(short))
    assert not torch.equal(logits(exact.load()), expected)
    assert torch.equal(logits(short.load()), expected)
    assert torch.equal(logits(short.load()), expected)
    first, second = sorted(files(cache), key=lambda file: file.stat().st_size)
    assert first.stat().st_size < size * second.stat().st_size
    for model, file in ((short, first), (exact, second)):
        assert model.weight_bytes == pytest.approx(file.stat().st_size, rel=0.1)


def test_weights_in_bfloat16_are_never_loaded_in_fp32(tiny_llama: ModelHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker loads what its driver checked on another machine, which may have kernels that this one lacks."""
    short = replace(tiny_llama, options=replace(tiny_llama.options, weights="bfloat16"))
    sent = pickle.dumps(short)
    assert torch.equal(logits(pickle.loads(sent).load()), logits(short.load()))
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    monkeypatch.setenv(native.VARIABLE, "off")
    with pytest.raises(KvatlasError, match=r"The model option weights is 'bfloat16'.*switched off"):
        pickle.loads(sent).load()


def change(file: Path, place: int) -> None:
    """Change a byte of a file at a place, and keep its size and its time."""
    status = file.stat()
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_other_weights_are_packed_anew(random_models: dict[str, ModelHandle], tmp_path: Path, cache: Path) -> None:
    model = copied(random_models["llama"], tmp_path / "model")
    before = logits(model.load())
    change(model.folder / "model.safetensors", -1)
    changed = replace(model)
    assert changed.weights_digest != model.weights_digest
    after = logits(changed.load())
    assert not torch.equal(after, before)
    assert torch.equal(after, logits(loaded_alone(changed)))
    assert len(files(cache)) == 1
    # A handle stands for the weights that it named, and a worker for those of its driver.
    with pytest.raises(KvatlasError, match="were changed meanwhile; start again"):
        pickle.loads(pickle.dumps(model)).load()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_packed_file_that_was_changed_is_made_anew(
    share: float, random_models: dict[str, ModelHandle], cache: Path
) -> None:
    model = random_models["llama"]
    expected = logits(model.load())
    (file,) = files(cache)
    packed = file.read_bytes()
    change(file, int(share * len(packed)))
    assert torch.equal(logits(model.load()), expected)
    assert file.read_bytes() == packed


def test_a_file_that_was_cut_off_is_made_anew(random_models: dict[str, ModelHandle], cache: Path) -> None:
    model = random_models["llama"]
    expected = logits(model.load())
    (file,) = files(cache)
    file.write_bytes(file.read_bytes()[:-100])
    assert torch.equal(logits(model.load()), expected)


def test_what_a_killed_process_left_is_removed(random_models: dict[str, ModelHandle], cache: Path) -> None:
    model = random_models["llama"]
    expected = logits(model.load())
    (file,) = files(cache)
    file.rename(cache / f"{file.name}.part")
    assert torch.equal(logits(model.load()), expected)
    assert files(cache) == [file]
    assert not [*cache.glob("*.part")]


def test_a_cache_that_cannot_be_written_is_read(
    random_models: dict[str, ModelHandle], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_models["llama"]
    expected = logits(model.load())
    monkeypatch.setattr("kvatlas.cpu.shared_weights.being_made", None)
    assert torch.equal(logits(model.load()), expected)


def test_a_folder_that_takes_no_file_is_done_without(
    random_models: dict[str, ModelHandle], cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache.write_text("not a folder")
    model = random_models["llama"]
    expected = logits(loaded_alone(model))
    assert torch.equal(logits(model.load()), expected)
    assert "weights are not shared" in capsys.readouterr().err


def test_faulty_weights_are_refused_before_they_are_packed(
    random_models: dict[str, ModelHandle], tmp_path: Path, cache: Path
) -> None:
    model = copied(random_models["llama"], tmp_path / "model")
    (model.folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(KvatlasError, match="is no safetensors file"):
        model.load()
    assert not files(cache)


def test_an_adapter_has_a_file_of_its_own(
    random_models: dict[str, ModelHandle], tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_models["llama"]
    model.load()
    adapted = with_adapter(model, save_adapter(model, tmp_path / "adapter"))
    expected = logits(adapted.load())
    assert len(files(cache)) == 2
    monkeypatch.setattr(Adapter, "merge", None)
    assert torch.equal(logits(adapted.load()), expected)


LOADED_BY_ITSELF = """
import sys
from pathlib import Path

from common import endless, resident

small, large = map(Path, sys.argv[1:])
# What libraries allocate at their first use is theirs.
endless(small).load()
handle = endless(large)
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
handle.load()
print((resident("VmHWM") - before) / handle.weight_bytes)
"""


@pytest.mark.deep
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_weight_is_freed_when_it_is_packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mapped file stays in memory as long as one of its weights does: then weights are there twice."""
    bench = Path(__file__).parents[2] / "bench"
    monkeypatch.syspath_prepend(bench)
    from common import bench_model

    shape = {"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    bench_model(tmp_path / "small", {**shape, "num_hidden_layers": 2})
    bench_model(tmp_path / "large", {**shape, "num_hidden_layers": 10})
    command = [sys.executable, "-c", LOADED_BY_ITSELF, str(tmp_path / "small"), str(tmp_path / "large")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(bench), *sys.path]), "OMP_NUM_THREADS": "1"}
    times_the_weights = float(subprocess.check_output(command, env=environment, text=True))
    assert times_the_weights < 1.7
