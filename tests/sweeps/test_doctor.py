"""`kvatlas check`, here and on a stand-in for a GPU."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from kvatlas.core import Check, CheckResult, KvatlasError
from kvatlas.cpu import native
from kvatlas.models import ModelHandle
from kvatlas.models.handle import handle_for
from kvatlas.sweeps import doctor
from tests.engine.gpu_stand_in import Gpu, gpu

__all__ = ["gpu"]


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> Callable[[], dict[str, CheckResult]]:
    """Return the findings on the GPU, which decodes little."""
    monkeypatch.setattr(doctor, "STEPS", 8)
    return lambda: {finding.name: finding for finding in doctor.check_machine()}


def test_it_prints_a_block_for_an_issue_report(succeed: Callable[..., str]) -> None:
    first, *lines, last = succeed("check", "cpu").splitlines()
    assert first == last == "```"
    kernels = "ok" if native.load() else "warning"
    assert [line.split()[:2] for line in lines][2:] == [[kernels, "kernels"], ["ok", "tokens"]]


def test_kernels_that_are_switched_off_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "off")
    monkeypatch.setattr(native, "_loaded", native._loaded.__wrapped__)
    versions, device, kernels = itertools.islice(doctor.check_machine("cpu"), 3)
    assert versions.message.startswith("kvatlas ")
    assert re.match(r"CPU \([^,].*, \d+ cores\), .*; no GPU in use", device.message)
    assert (kernels.name, kernels.status) == ("kernels", Check.WARNING)
    assert kernels.message == "The native CPU kernels are switched off (KVATLAS_NATIVE=off)"
    assert kernels.advice == "torch computes instead, slower"


def test_a_gpu_is_examined(examined: Callable[[], dict[str, CheckResult]], gpu: Gpu) -> None:
    result = examined()
    assert {finding.status for finding in result.values()} == {Check.OK}
    assert "70.0 GiB free of 80.0; GPUs: 1" in result["device"].message
    assert result["CUDA graphs"].message.startswith("captured: ")
    assert "flex against reference" in result["tokens"].message
    assert gpu.captured


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (1, "would compute other logits than in transformers"),
        # Right for the two texts that a model reads first.
        (3, " of 9 sequences differ, the first from new token 2 on (flex against"),
    ],
)
def test_wrong_tokens_are_a_failure(
    examined: Callable[[], dict[str, CheckResult]], monkeypatch: pytest.MonkeyPatch, rows: int, sentence: str
) -> None:
    from tests.engine import gpu_stand_in

    paged = gpu_stand_in.paged_attention

    def wrong(query: Any, *given: Any, **named: Any) -> Any:
        out, extra = paged(query, *given, **named)
        return out * (0.5 if len(query) >= rows else 1), extra

    monkeypatch.setattr(gpu_stand_in, "paged_attention", wrong)
    result = examined()
    assert result["tokens"].status is Check.FAILED
    assert sentence in result["tokens"].message


def test_weights_larger_than_a_gpu_are_refused(
    random_models: dict[str, ModelHandle], gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from kvatlas import models

    model = models.find(random_models["llama"].name, device="cuda:0", dtype="float32")
    assert model.load().device.type == "cuda"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1000, 80 << 30))
    with pytest.raises(KvatlasError, match=r"GiB of weights, cuda:0 has 0\.0 GiB free of 80\.0; expected models that"):
        model.load()
    # What torch keeps of a model before is free, though the device calls it taken.
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: 2 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 1 << 30)
    assert model.load().device.type == "cuda"


def test_a_model_on_several_devices_is_refused(random_models: dict[str, ModelHandle], tmp_path: Any) -> None:
    from transformers import AutoModelForCausalLM

    folder = random_models["llama"].folder
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map={"model": "cpu", "lm_head": "disk"}, offload_folder=tmp_path
    )
    with pytest.raises(KvatlasError, match=r"lie on several devices \(0\.0 GiB on cpu, 0\.0 GiB on meta\)"):
        handle_for(model, None, frozenset({1}))
