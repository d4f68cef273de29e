"""Teaches SmolLM2-135M-Instruct to think on WORDS problems: a LoRA adapter, small problems first, holes in the cache
later.

    python recipes/smollm/train.py --out build/smollm --tokens 1.5e6 --seed 1

Prints one JSON object every few steps, writes a checkpoint now and then and resumes from there when started again. The
result, `adapter_config.json` and `adapter_model.safetensors`, is as peft writes it; the chat template that opens
thinking lies beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from solutions import solution
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from kvatlas import models
from kvatlas.benchmarks.words import DIFFERENCES, MOST, draw_story

sys.path.append(str(Path(__file__).parent.parent / "embedded"))
from masks import batch_mask, unseen

BASE = "smollm2-135m"
RANK, ALPHA = 16, 32
LARGEST = 14
WARM_UP_STEPS = 50
CHECKPOINT_SECONDS = 180.0
#: Shares of the tokens: problems grow until GROWN, then DRILLS of sums, then HOLES begin; the rate falls from FLAT on.
GROWN, DRILLS, HOLES, FLAT = 0.25, 0.43, 0.45, 0.5
#: A drill has so many sums; a share of the sequences are drills. A problem has one sum in 55 tokens, a drill one in 9:
#: without them problems are laid out right, and their sums go wrong.
DRILL_SUMS, DRILL_SHARE = 24, 0.25
#: Batches of one pool, whose sequences are sorted by length.
POOL_BATCHES = 6
THINK, END_THINK, END = "<think>\n", "</think>\n", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Example:
    """One training sequence of token ids; the first `prompt` are given. `results` are the places [start, end) that
    state a count, by its name; thinking ends before `thinking_end`."""

    words: tuple[int, ...]
    prompt: int
    results: tuple[tuple[str, int, int], ...]
    thinking_end: int


class LoRA(nn.Module):
    """A frozen linear layer and what is learnt beside it (Hu et al. 2021, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.empty(RANK, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, RANK))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        small = nn.functional.linear(x, self.lora_A.to(x.dtype))
        return self.base(x) + ALPHA / RANK * nn.functional.linear(small, self.lora_B.to(x.dtype))


def adapted(seed: int) -> nn.Module:
    """The base model in bfloat16, frozen, with an adapter in all linear layers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(models.find(BASE).folder, dtype=torch.bfloat16)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(part, name, LoRA(linear))
    return model


def adapter(model: nn.Module) -> dict[str, Tensor]:
    """Return the learnt tensors by their names in the model."""
    return {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}


def save_adapter(model: nn.Module, folder: Path) -> None:
    """As peft writes it, in half precision, with the chat template."""
    named = {f"base_model.model.{name}.weight": tensor.detach().half() for name, tensor in adapter(model).items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted({name.split(".")[-3] for name in named})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": targets,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


class Writer:
    """Writes training sequences in the tokens of the model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def example(self, size: int, rng: random.Random) -> Example:
        """A fresh problem with so many facts on the way, and its solution."""
        story = draw_story(size, rng)
        done = solution(story, rng)
        prompt = f"<|im_start|>user\n{story.question}<|im_end|>\n<|im_start|>assistant\n{THINK}"
        ids = self._ids(prompt)
        begin = len(ids)
        starts = []
        for piece in done.pieces:
            starts.append(len(ids))
            ids += self._ids(piece)
        starts.append(len(ids))
        results = tuple((name, starts[i], starts[i + 1]) for name, i in done.results)
        ids += self._ids(f"{END_THINK}{done.answer}{END}")
        return Example(tuple(ids), begin, results, starts[-1])

    def drill(self, rng: random.Random) -> Example:
        """Sums as they are in problems, without one."""
        ids = self._ids("<|im_start|>user\nCompute.<|im_end|>\n<|im_start|>assistant\n")
        begin = len(ids)
        for _ in range(DRILL_SUMS):
            count, size = rng.randint(1, MOST), rng.randint(*DIFFERENCES)
            sign = rng.choice("+-") if size < count <= MOST - size else "-" if size < count else "+"
            ids += self._ids(f" {count} {sign} {size} =")
            ids += self._ids(f" {count + size if sign == '+' else count - size}.\n")
        return Example(tuple(ids), begin, (), len(ids))


def batches(
    writer: Writer, seed: int, pool: int, largest: int, batch_tokens: int, drills: bool = False
) -> list[list[Example]]:
    """The batches of one pool, each of sequences of like length; a function of its arguments alone."""
    rng = random.Random(f"kvatlas words train {seed} pool {pool}")
    rows: list[Example] = []
    while sum(len(row.words) for row in rows) < POOL_BATCHES * batch_tokens:
        if drills and rng.random() < DRILL_SHARE:
            rows.append(writer.drill(rng))
        else:
            rows.append(writer.example(rng.randint(2, largest), rng))
    rows.sort(key=lambda row: len(row.words))
    found = []
    while rows:
        take = max(1, batch_tokens // len(rows[-1].words))
        found.append(rows[-take:])
        del rows[-take:]
    rng.shuffle(found)
    return found


def loss_of(model: nn.Module, batch: list[Example], holes: bool, rng: random.Random) -> tuple[Tensor, float]:
    """Mean cross-entropy over thinking and answer, and the share of counts' tokens that are right.

    With holes counts of which no copy can be seen are not asked for.
    """
    length = max(len(row.words) for row in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    asked = torch.zeros(ids.shape, dtype=torch.bool)
    counted = torch.zeros(ids.shape, dtype=torch.bool)
    mask = None
    if holes:
        kv_heads = model.config.num_key_value_heads
        visible = batch_mask(batch, kv_heads, model.config.num_attention_heads // kv_heads, rng)
        mask = torch.from_numpy(visible)
    for i, row in enumerate(batch):
        ids[i, : len(row.words)] = torch.tensor(row.words)
        asked[i, row.prompt - 1 : len(row.words) - 1] = True
        for _, first, last in row.results:
            counted[i, first - 1 : last - 1] = True
        if holes:
            asked[i, [place - 1 for place in unseen(row, visible[i])]] = False
    positions = torch.arange(length)[None].expand(len(batch), -1)
    hidden = model.model(ids, attention_mask=mask, position_ids=positions, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[asked]).float()
    targets = ids.roll(-1, 1)[asked]
    right = (logits.argmax(-1) == targets)[counted[asked]].float().mean().item()
    return nn.functional.cross_entropy(logits, targets), right


def rate_factor(step: int, progress: float) -> float:
    """Warm-up, flat to FLAT, then linear to 3 %."""
    return min((step + 1) / WARM_UP_STEPS, 1.0, 1.0 - 0.97 * max(0.0, progress - FLAT) / (1.0 - FLAT))


def train(args: argparse.Namespace) -> None:
    """Runs to its number of tokens, resuming from the checkpoint in `args.out` if there is one."""
    model = adapted(args.seed)
    writer = Writer(models.find(BASE).tokenizer)
    learnt = list(adapter(model).values())
    optimizer = torch.optim.AdamW(learnt, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    checkpoint = args.out / "checkpoint.pt"
    step = pool = tokens = 0
    seconds = 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["adapter"], strict=False)
        optimizer.load_state_dict(state["optimizer"])
        step, pool, tokens, seconds = state["step"], state["pool"], state["tokens"], state["seconds"]
    started, saved = time.monotonic() - seconds, time.monotonic()
    while tokens < args.tokens:
        largest = min(LARGEST, 4 + round((LARGEST - 4) * tokens / (GROWN * args.tokens)))
        losses, rights = [], []
        drills = tokens >= DRILLS * args.tokens
        for batch in batches(writer, args.seed, pool, largest, args.batch_tokens, drills):
            progress = tokens / args.tokens
            for group in optimizer.param_groups:
                group["lr"] = args.rate * rate_factor(step, progress)
            holes = progress > HOLES
            loss, right = loss_of(model, batch, holes, random.Random(f"holes {args.seed} {step}"))
            loss.backward()
            nn.utils.clip_grad_norm_(learnt, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            # A batch of drills states no count.
            rights += [right] if right == right else []
            step, tokens = step + 1, tokens + sum(len(row.words) for row in batch)
        seconds = time.monotonic() - started
        pool += 1
        line = {"step": step, "tokens": tokens, "seconds": round(seconds), "largest": largest}
        line |= {"loss": round(sum(losses) / len(losses), 4), "counts": round(sum(rights) / max(1, len(rights)), 3)}
        print(json.dumps(line), flush=True)
        if time.monotonic() - saved > CHECKPOINT_SECONDS or tokens >= args.tokens:
            saved = time.monotonic()
            state = {"adapter": adapter(model), "optimizer": optimizer.state_dict()}
            state |= {"step": step, "pool": pool, "tokens": tokens, "seconds": saved - started}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
            save_adapter(model, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the adapter and the checkpoint")
    parser.add_argument("--tokens", type=float, default=1.5e6)
    parser.add_argument("--rate", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--batch-tokens", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    train(args)


if __name__ == "__main__":
    main()
