"""Logs written by hand in the formats of lm-eval and Inspect, for what their own programs cannot be made to write."""

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DATE = "2026-01-0{}T00-00-00.000000"
DRAWN = {"until": ["\n"], "do_sample": True, "temperature": 0.7, "max_gen_toks": 256}
GREEDY = {"until": ["\n"], "do_sample": False}


def lm_row(index: int, score: Any = 1.0, **changes: Any) -> dict[str, Any]:
    """A row of lm-eval's samples; `prompt`, `text`, `metric` and `generation` fill its fields, others replace them."""
    text = changes.pop("text", f"answer {index}")
    metric = changes.pop("metric", "exact_match")
    request = {"arg_0": changes.pop("prompt", f"Q{index}?"), "arg_1": changes.pop("generation", GREEDY)}
    row = {"doc_id": index, "doc": {"question": f"q{index}"}, "target": str(index)}
    row |= {"arguments": {"gen_args_0": request}, "resps": [[text]], "filtered_resps": [text], "filter": "none"}
    return {**row, "metrics": [metric], metric: score, **changes}


def write_lm(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    results: Any = None,
    day: int = 1,
    name: str = "results",
    gz: bool = False,
) -> Path:
    """A folder with lm-eval's samples of the task t, and with a results file beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path = folder / f"samples_t_{DATE.format(day)}.jsonl"
    if gz:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    if results is not None:
        (folder / f"{name}_{DATE.format(day)}.json").write_text(json.dumps(results))
    return folder


def results_of(**changes: Any) -> dict[str, Any]:
    """A results file of the task t."""
    config = {"model": "hf", "model_args": {"pretrained": "m"}, "torch_seed": 1, **changes.pop("config", {})}
    whole = {"results": {"t": {}}, "versions": {"t": 1}, "n-shot": {"t": 0}, "config": config}
    return {**whole, "higher_is_better": {"t": {"exact_match": True}}, **changes}


def inspect_sample(index: int, value: Any = "C", **changes: Any) -> dict[str, Any]:
    """A sample of an Inspect log; `scorer`, `text`, `epoch` and `prompt` fill its fields, others replace them."""
    message = {"role": "assistant", "content": changes.pop("text", f"answer {index}")}
    sample: dict[str, Any] = {"id": index, "epoch": changes.pop("epoch", 1), "input": f"q{index}", "target": "8"}
    sample["messages"] = [{"role": "user", "content": changes.pop("prompt", f"q{index}")}, message]
    sample["output"] = {"model": "g", "choices": [{"message": message, "stop_reason": "stop"}]}
    return {**sample, "scores": {changes.pop("scorer", "match"): {"value": value}}, **changes}


def write_inspect(
    path: Path, samples: Sequence[Mapping[str, Any]], config: Mapping[str, Any] | None = None, **spec: Any
) -> Path:
    """A finished log of Inspect as JSON, packed if its name ends in .gz; `spec` are fields of its `eval`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    epochs = max(sample["epoch"] for sample in samples)
    about = {"created": "2026-01-01T00:00:00+00:00", "task": "t", "task_id": "t", "task_version": 1, "task_args": {}}
    about |= {"dataset": {"name": "d", "samples": len(samples) // epochs}, "model": "openai/g", "model_args": {}}
    about |= {"config": {"epochs": epochs}, "packages": {}, "run_id": str(path), "eval_id": str(path), **spec}
    steps = about.pop("steps", [{"solver": "generate", "params": {}}])
    plan = {"name": "plan", "steps": steps, "config": {"temperature": 0.7} if config is None else config}
    log = {"version": 2, "status": "success", "eval": about, "plan": plan, "results": {"scores": []}, "stats": {}}
    text = json.dumps({**log, "samples": samples})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A file of answers as JSON lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
