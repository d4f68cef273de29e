"""What OpenVINO GenAI's cache eviction does: its knobs as a map, each cell exported, served and verified.

    optimum-cli export openvino --model FOLDER --task text-generation-with-past --weight-format fp32 CONVERTED
    python bench/openvino_eviction.py --converted CONVERTED --folder build/openvino --out bench/results/openvino.json

FOLDER is src/kvatlas/models/embedded/tiny-llama. The full cache and `h2o` in the engine's terms are decoded here; then
for each cell `export-setting --to openvino` is served by recipes/openvino/serve.py and asked by `verify --knob`, and so
is the engine without eviction, with its cache in fp32 and in eight bits. Resumed where it was stopped; prints one JSON
document, and leaves the map of the engine's knobs in the folder. Needs `pip install 'kvatlas[openvino]'`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

from keeping import keep
from kvatlas.core import Setting
from kvatlas.results import Store
from kvatlas.stats.estimates.run_data import RunData
from kvatlas.sweeps import make_plan, parse_spec, sweep

ROOT = Path(__file__).parents[1]
AXES = {"kv_budget": [192, 288, 384], "local_window": [32, 64, 128]}
SPEC = {
    "models": ["embedded:tiny-llama"],
    "benchmarks": ["CHAIN6-14"],
    "problems": 150,
    "samples": 1,
    "sampling": {"temperature": 0, "max_new_tokens": 700},
    "baseline": [{"policy": "full"}],
    "settings": {"policy": "h2o", "scope": "layer", "keep_prompt": False, "every": 32},
    "axes": AXES,
    "lose_at_most": 5,
}
#: Endpoints by name: the cell each is held against, the engine's knobs, and what the device is told.
ENDPOINTS: dict[str, tuple[str, dict[str, int], list[str]]] = {
    "no eviction": ("full", {}, []),
    "no eviction, cache in eight bits": ("full", {}, ["KV_CACHE_PRECISION=u8"]),
    **{
        f"max_cache_size={budget} recent_size={window}": (
            f"h2o kv_budget={budget} local_window={window}",
            {"max_cache_size": budget, "recent_size": window},
            [],
        )
        for budget, window in product(*AXES.values())
    },
}


def kvatlas(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvatlas", *map(str, words)], capture_output=True, text=True, check=False
    )


def verified(name: str, converted: Path, folder: Path) -> dict[str, Any]:
    """One endpoint deployed, asked and held against its cell; what was found before is read."""
    cell, knobs, properties = ENDPOINTS[name]
    own = folder / name.replace(" ", "_")
    if (own / "found.json").is_file():
        document: dict[str, Any] = json.loads((own / "found.json").read_text())
        return document
    own.mkdir(exist_ok=True)
    words = [sys.executable, str(ROOT / "recipes/openvino/serve.py"), str(converted), "--port", "0"]
    if knobs:
        kvatlas(
            "export-setting", folder / "run", "--setting", cell, "--to", "openvino", "--out", own
        ).check_returncode()
        words += ["--setting", str(own / "openvino.py")]
    words += [f"--property={item}" for item in ("INFERENCE_NUM_THREADS=1", *properties)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    answers = folder / "served" if knobs else own / "served"
    try:
        url = next(match_[0] for line in process.stdout if (match_ := re.search(r"http://\S+?:\d+", line)))
        given = [f"--knob={knob}={value}" for knob, value in knobs.items()]
        asked = ("verify", url, "--against", folder / "run", "--cell", cell, "--out", answers, "--concurrency", 64)
        done = kvatlas(*asked, *given, "--quiet", "--json")
    finally:
        process.terminate()
        process.wait(60)
    assert done.returncode != 2, done.stderr
    said = json.loads(done.stdout)
    document = {
        "cell": cell,
        "exit_code": done.returncode,
        **{f"against_{side}": said[side] for side in ("cell", "full") if said[side]},
        "failed_checks": [check["sentence"] for check in said["checks"] if not check["good"]],
    }
    (own / "found.json").write_text(json.dumps(document))
    return document


def texts(run: Path, policy: str) -> dict[str, str]:
    """The text of each problem under a policy's only setting, from within its thinking."""
    with Store.open(run) as store:
        traces = [trace for _, trace in store.traces() if trace.setting.policy == policy]
    return {trace.problem: trace.text.removeprefix("<think>") for trace in traces}


def shares(run: Path) -> dict[Setting, dict[str, float]]:
    """Pass@1 in percent of every cell, with its interval, and what its answers took."""
    by_name = {}
    for cell in RunData.open(run).cells:
        shown = cell.cell()
        low, high = shown.estimate.low, shown.estimate.high
        assert low is not None
        assert high is not None
        by_name[cell.expected.setting] = {
            **{
                name: round(100 * value, 1)
                for name, value in zip(("pass_at_1", "low", "high"), (shown.estimate.value, low, high), strict=True)
            },
            "output_tokens": round(shown.output_tokens_mean or 0, 1),
        }
    return by_name


def main() -> None:
    """Decode, deploy, verify, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--converted", type=Path, required=True, help="The converted model.")
    parser.add_argument("--folder", type=Path, required=True, help="Where runs and answers are kept.")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sweep(make_plan(parse_spec(SPEC)), options.folder / "run", workers=1)
    by_name = {name: verified(name, options.converted, options.folder) for name in ENDPOINTS}
    ours = texts(options.folder / "run", "full")
    for name in [name for name, (cell, *_) in ENDPOINTS.items() if cell == "full"]:
        theirs = texts(options.folder / name.replace(" ", "_") / "served", "served")
        by_name[name]["same_text"] = sum(ours[problem] == text for problem, text in theirs.items())
    kvatlas("map", options.folder / "served", "--out", options.folder / "knobs.png").check_returncode()
    keep(
        {
            "program": "openvino",
            "spec": SPEC,
            "versions": {name: version(name) for name in ("openvino", "openvino-genai")},
            "kvatlas": {str(setting): values for setting, values in shares(options.folder / "run").items()},
            "openvino": {str(setting): values for setting, values in shares(options.folder / "served").items()},
            "verified": by_name,
        },
        options.out,
    )


if __name__ == "__main__":
    main()
