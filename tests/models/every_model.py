"""Every causal language model of the installed transformers, small, against its own `generate`.

    python -m tests.models.every_model    # as JSON lines; NAME ... tries some; --document writes docs/model-types.md

Each is made with random weights, saved, loaded by its address and decoded by the engine: each prompt alone, and all of
them in one ragged batch. Tokens and logits must be those of `generate`, or it must be refused in a sentence.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Lengths of the prompts: within every sliding window here, beyond it, and on both sides of the original positions.
LENGTHS = (5, 23, 63, 120, 211, 300)
NEW_TOKENS = 8
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
GREEDY |= {"output_logits": True, "return_dict_in_generate": True}
WINDOW, ORIGINAL, VOCABULARY = 24, 100, 128
ORIGINAL_LENGTH = "original_max_position_embeddings"
#: The largest difference of logits, in their standard deviations, that is rounding.
ROUNDING = 1e-3
#: Parameters of the largest model that is tried.
PARAMETERS = 30e6

_SIZES: dict[int, str] = {
    1: "n_group topk_group num_expert_groups",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok moe_topk moe_k",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_attention_heads n_head n_heads "
    "decoder_attention_heads encoder_attention_heads num_heads num_encoder_layers num_decoder_layers mamba_n_heads",
    8: "qk_rope_head_dim num_experts n_routed_experts num_local_experts moe_num_experts",
    16: "head_dim v_head_dim qk_nope_head_dim attention_head_dim hidden_size_per_layer_input",
    WINDOW: "sliding_window attention_window_size window_size attention_chunk_size",
    32: "kv_lora_rank q_lora_rank moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size "
    "linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim global_head_dim",
    64: "hidden_size n_embd d_model emb_dim embedding_size",
    96: "intermediate_size ffn_dim n_inner decoder_ffn_dim encoder_ffn_dim",
    VOCABULARY: "vocab_size vocab_size_per_layer_input",
    1024: "max_position_embeddings n_positions max_seq_len",
}
#: What is made smaller, by the names that configurations have for it.
SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}


def _rope(kind: str, original: int = ORIGINAL, **own: Any) -> dict[str, Any]:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, **own}
    if kind not in ("default", "dynamic", "linear"):
        rope[ORIGINAL_LENGTH] = original
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [1.0 + index for index in range(8)]}
    return {"rope_parameters": rope}


#: What shrinking breaks, and options of real models that the defaults leave off: by type, or type and a word.
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere norms": {"use_qk_norm": True},
    "deepseek_v3 yarn": _rope("yarn", factor=8.0, mscale=1.0, mscale_all_dim=1.0),
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "falcon": {"num_kv_heads": 4},
    "falcon alibi": {"num_kv_heads": 4, "alibi": True},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_d_head": 16},
    "gemma3_text": {"sliding_window_pattern": 2},
    "gemma3n_text": {
        "intermediate_size": 96,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4_moe": {"first_k_dense_replace": 1},
    "gpt_neox stray": {"num_key_value_heads": 2},
    "granite multipliers": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
        "logits_scaling": 2.0,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "lfm2": {"full_attn_idxs": [1, 3], "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama bias": {"attention_bias": True, "mlp_bias": True},
    "llama dynamic": {**_rope("dynamic", factor=4.0), "max_position_embeddings": 400},
    "llama dynamic beyond": {**_rope("dynamic", factor=4.0), "max_position_embeddings": ORIGINAL},
    "llama linear": _rope("linear", factor=4.0),
    "llama llama3": _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "llama longrope": _rope("longrope", 400),
    "llama longrope beyond": _rope("longrope"),
    "llama yarn": _rope("yarn", factor=8.0),
    "ministral3": _rope("yarn", factor=8.0, llama_4_scaling_beta=0.1),
    "nemotron": {"num_key_value_heads": 2},
    "olmo clip": {"clip_qkv": 0.5},
    "opt stray": {"num_key_value_heads": 2},
    "phi norms": {"qk_layernorm": True},
    "phi3 longrope": {**_rope("longrope", 400), ORIGINAL_LENGTH: 400},
    "phi3 longrope beyond": {**_rope("longrope"), ORIGINAL_LENGTH: ORIGINAL},
    "phi3 partial": _rope("default", partial_rotary_factor=0.5),
    "phimoe longrope": {**_rope("longrope", 400, short_mscale=1.1, long_mscale=1.3), ORIGINAL_LENGTH: 400},
    "qwen2 window": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": WINDOW},
    "qwen3 window": {"use_sliding_window": True, "max_window_layers": 2, "sliding_window": WINDOW},
    "stablelm norms": {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True},
    "zaya": {"num_experts_per_tok": 1},
}


def every() -> list[str]:
    """All cases: each type of transformers, and what `OWN` adds to one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *OWN})


def small_config(made_by: Any, own: dict[str, Any]) -> Any:
    """A configuration of that class whose sizes are small; of what it consists of, too."""
    known = vars(made_by())
    values = {name: size for name, size in SMALL.items() if known.get(name) is not None}
    if "head_dim" in known:
        values["head_dim"] = SMALL["head_dim"]
    if "qk_rope_head_dim" in known:
        # Latent attention: as many key heads as heads, and a head size that follows from others.
        values["num_key_value_heads"] = SMALL["num_attention_heads"]
        values.pop("head_dim", None)
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1)
    parts = {
        name: small_config(type(known[name]), {}) for name in getattr(made_by, "sub_configs", {}) if known.get(name)
    }
    values |= {name: one for name, one in ids.items() if name in known} | parts
    return made_by(**{**values, **own})


def save(name: str, folder: Path) -> None:
    """A model of a case with random weights whose logits are far from ties, with a real tokenizer."""
    import shutil

    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from kvatlas.models import EMBEDDED

    own = OWN.get(name, {})
    config = small_config(CONFIG_MAPPING[name.split()[0]], own)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 * weight.shape[-1] ** -0.5)
            else:
                weight += 0.2 * torch.randn_like(weight)
    model.save_pretrained(folder)
    source = next(EMBEDDED.glob("*/tokenizer.json")).parent
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / file).is_file():
            shutil.copy(source / file, folder / file)
    stray = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stray, **own}))


def compare(name: str, folder: Path) -> dict[str, Any]:
    """`alone`, `ragged`: whether the engine gives what `generate` gives; `bits`: whether the batch changes no bit.

    `refused` is the sentence of a model that the engine does not take, `unmade` why there is nothing to compare.
    """
    from dataclasses import replace

    import torch
    from transformers import AutoModelForCausalLM

    from kvatlas import policies
    from kvatlas.core import KvatlasError, Sampling, Setting
    from kvatlas.engine import Engine, Request
    from kvatlas.models import Overrides, find

    try:
        save(name, folder)
        plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    except Exception as error:
        return {"unmade": f"{type(error).__name__}: {error}"}
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    full, sampling = (
        policies.from_setting(Setting.from_parameters("full")),
        Sampling(temperature=0.0, max_new_tokens=NEW_TOKENS),
    )

    def decode(batch: Sequence[int]) -> dict[int, tuple[list[int], Any]]:
        seen: dict[int, list[Any]] = {index: [] for index in batch}

        def request(index: int) -> Request[int]:
            def keep(_: object, logits: Any) -> Any:
                seen[index].append(logits.detach().clone())
                return logits

            return Request(index, tuple(prompts[index]), 0, (full,), logits_processor=keep)

        engine = Engine(handle, model, [full], sampling, len(batch))
        generations = list(engine.run([request(index) for index in batch]))
        return {made.key: (list(made.tokens), torch.stack(seen[made.key])) for made in generations}

    try:
        handle = find(f"hf:{folder}")
        handle.check()
        handle = replace(handle, overrides=Overrides(stops=frozenset()))
        model = handle.load()
        alone = {index: decode([index])[index] for index in range(len(prompts))}
        ragged = decode(range(len(prompts)))
    except KvatlasError as error:
        return {"refused": str(error).replace(f" {handle.name!r}", "")}
    theirs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        try:
            plain = AutoModelForCausalLM.from_pretrained(folder).eval()
            out = plain.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)
        except Exception as error:
            return {"unmade": f"generate: {type(error).__name__}: {error}"}
        theirs.append((out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)))

    def same(ours: dict[int, tuple[list[int], Any]]) -> list[float]:
        return [
            float(((ours[index][1] - logits).abs().amax(-1) / logits.std(-1)).max())
            if ours[index][0] == tokens
            else inf
            for index, (tokens, logits) in enumerate(theirs)
        ]

    bits = all(torch.equal(alone[index][1], ragged[index][1]) for index in range(len(prompts)))
    return {"alone": same(alone), "ragged": same(ragged), "bits": bits}


def attempt(name: str) -> dict[str, Any]:
    """Make and compare a case; `error` is what neither expected."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return compare(name, Path(folder))
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


def attempt_apart(name: str) -> dict[str, Any]:
    """Do the same in a process of its own; `crash` where the interpreter ended."""
    command = [sys.executable, "-m", "tests.models.every_model", "--here", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if done.returncode:
        return {"crash": f"the interpreter ended with {done.returncode}"}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def verdict(result: dict[str, Any]) -> str:
    """equal, refused, unmade, differs, error or crash."""
    for name in ("refused", "unmade", "error", "crash"):
        if name in result:
            return name
    return "equal" if max(*result["alone"], *result["ragged"]) < ROUNDING else "differs"


def table(tried: dict[str, dict[str, Any]]) -> str:
    """Markdown: a line for all types that end alike."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, result in tried.items():
        ended = verdict(result)
        if ended in ("equal", "differs"):
            cells = [*("yes" if max(result[how]) < ROUNDING else "no" for how in ("alone", "ragged"))]
            cells += ["yes" if result["bits"] else "no", ""]
        elif ended == "unmade":
            cells = ["", "", "", "not tried: cannot be made small, or needs what is not installed"]
        else:
            # Numbers, and what stands in brackets, differ from model to model; what was expected is the same.
            reason = re.sub(r"\b\d[\d,]*\b", "N", re.sub(r" \(.*\)|; expected[^;]*(?=\.$)", "", result[ended]))
            cells = ["", "", "", reason if ended == "refused" else ended]
        groups.setdefault(tuple(cells), []).append(name)
    lines = ["| types | alone | in a ragged batch | bit for bit | refused |", "|---|---|---|---|---|"]
    for cells, names in sorted(groups.items(), key=lambda group: (group[0][::-1], group[1])):
        lines.append("| " + " | ".join((", ".join(sorted(names)), *cells)) + " |")
    return "\n".join(lines)


def document(tried: dict[str, dict[str, Any]]) -> None:
    """Write the table into docs/model-types.md, between its marks."""
    import transformers

    page, marks = ROOT / "docs/model-types.md", ("<!-- every model: begin -->", "<!-- every model: end -->")
    before, _, rest = page.read_text().partition(marks[0])
    written = f"{marks[0]}\n\ntransformers {transformers.__version__}:\n\n{table(tried)}\n\n{marks[1]}"
    page.write_text(before + written + rest.partition(marks[1])[2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--document", action="store_true")
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    tried = {}
    for name in given.names or every():
        tried[name] = attempt(name) if given.here else attempt_apart(name)
        print(json.dumps({"name": name, **tried[name]}), flush=True)
    if given.document:
        document(tried)


if __name__ == "__main__":
    main()
