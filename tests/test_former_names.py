"""Names of version 0.1.0 of documented objects: they warn with the present name, and do what they did."""

from importlib import import_module
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from kvatlas.core import Costs, EvictionTrace, Grade, Sampling, Setting, Status, Trace
from kvatlas.engine import Engine, Request
from kvatlas.models import ModelHandle
from kvatlas.models.load_options import Options
from kvatlas.policies import from_setting


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("kvatlas.stats.losses.Difference", "kvatlas.stats.paired.Difference"),
        ("kvatlas.stats.inference.Contrast", "kvatlas.stats.numerics.arrays.Contrast"),
        ("kvatlas.stats.inference.Test", "kvatlas.stats.verdicts.Test"),
        ("kvatlas.stats.inference.TestMethod", "kvatlas.stats.verdicts.TestMethod"),
        ("kvatlas.policies.base.CompressingPolicy", "kvatlas.policies.CompressingPolicy"),
        ("kvatlas.policies.base.Scope", "kvatlas.policies.Scope"),
        ("kvatlas.policies.of", "kvatlas.policies.from_setting"),
    ],
)
def test_an_object_of_another_name_or_module_is_found_under_the_former_one(former: str, present: str) -> None:
    former_module, _, former_name = former.rpartition(".")
    module, _, name = present.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"^{former} is {present} since version 0.2.$"):
        found = getattr(import_module(former_module), former_name)
    assert found is getattr(import_module(module), name)


def test_an_unknown_name_of_such_a_module_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'kvatlas.stats.losses' has no attribute 'nothing'"):
        _ = import_module("kvatlas.stats.losses").nothing


def test_former_constructors_and_fields_give_what_the_present_ones_give() -> None:
    with pytest.warns(DeprecationWarning, match="Setting.from_parameters"):
        assert Setting.of("window", ratio=0.3) == Setting.from_parameters("window", ratio=0.3)
    with pytest.warns(DeprecationWarning, match="Options.from_values"):
        assert Options.of({"dtype": "float32"}) == Options(dtype="float32")
    grade = Grade(True, 1.0, "5", Status.OK)
    costs = Costs(*(None,) * 7)
    trace = Trace("m", "b", "p", 0, Setting("full"), (), "", grade, costs, token_digest="ab")
    with pytest.warns(DeprecationWarning, match="Trace.token_digest"):
        assert trace.written == "ab"
    evictions = EvictionTrace(1, (0, 5), (1, 0))
    with pytest.warns(DeprecationWarning, match="EvictionTrace.evicted_at"):
        assert evictions.left == evictions.evicted_at
    with pytest.warns(DeprecationWarning, match="EvictionTrace.kept_by"):
        assert evictions.held == evictions.kept_by


def test_facts_that_a_program_sets_on_a_handle_replace_those_of_its_files(tmp_path: Path) -> None:
    """Measurements decode models without a tokenizer, and without an end."""
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = LlamaConfig(**sizes)
    config.save_pretrained(tmp_path)
    handle = ModelHandle("hf:measured", tmp_path)
    vars(handle).update(stops=frozenset(), think_close=-1, opens_thinking=True)
    policy = from_setting(Setting("full"))
    model = LlamaForCausalLM(config).eval()
    engine = Engine(handle, model, [policy], Sampling(max_new_tokens=12), 1)
    (generation,) = engine.run([Request(0, (5, 6, 7), 0, (policy,))])
    assert len(generation.tokens) == generation.usage.thinking_tokens == 12
    assert not generation.finished
