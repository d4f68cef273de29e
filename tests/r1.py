"""Small models with random weights that speak as DeepSeek-R1's distilled models do: tokenizer, chat format, think tags.

The tokenizer is a real byte-level BPE, trained here; only its vocabulary is small.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from kvatlas import models
from kvatlas.models import ModelHandle
from tests.models.every_model import small_config

DATA = Path(__file__).parent / "data"
AIME = DATA / "aime24.jsonl"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
#: The published template without its parts on tools: it opens thinking itself.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '"
    + USER
    + "' + message['content'] }}"
    "{% else %}{{ '" + ASSISTANT + "' + message['content'] + '" + EOS + "' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "<think>\\n' }}{% endif %}"
)
#: The template of the first release: the model opens thinking.
FIRST_TEMPLATE = TEMPLATE.replace("<think>\\n", "")


def save_tokenizer(folder: Path, template: str = TEMPLATE, tags: tuple[str, ...] = ("<think>", "</think>")) -> None:
    """A byte-level BPE with R1's special tokens; `tags` are single tokens, as in the published ones."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = [json.loads(line)["problem"] for line in AIME.read_text().splitlines()]
    texts += [(DATA / "words.txt").read_text()]
    trainer = trainers.BpeTrainer(
        vocab_size=800, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=[BOS, EOS, USER, ASSISTANT]
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=EOS, chat_template=template
    ).save_pretrained(folder)


def edit(folder: Path, name: str, **changes: object) -> None:
    """Change values of a JSON file; None removes one."""
    content = json.loads((folder / name).read_text())
    kept = {key: value for key, value in content.items() if key not in changes}
    (folder / name).write_text(json.dumps(kept | {key: value for key, value in changes.items() if value is not None}))


def copied(model: ModelHandle, folder: Path, name: str = "", **changes: object) -> ModelHandle:
    """A copy of a model in a new folder, one of its JSON files changed."""
    shutil.copytree(model.folder, folder)
    if name:
        edit(folder, name, **changes)
    return models.find(f"hf:{folder}")


def save_model(kind: str, folder: Path, shards: str = "5GB", **tokenizer: Any) -> ModelHandle:
    """A 2-layer model ("llama" or "qwen2") with random weights and a random DynTS head."""
    import torch
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

    from kvatlas.predictor.training import new_head

    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder, **tokenizer)
    own = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "vocab_size": len(AutoTokenizer.from_pretrained(folder)),
        "bos_token_id": 0,
        "pad_token_id": None,
    }
    config = small_config(CONFIG_MAPPING[kind], own)
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size=shards)
    save_file({name: value.detach() for name, value in new_head(64).state_dict().items()}, folder / "dynts.safetensors")
    return models.find(f"hf:{folder}")
