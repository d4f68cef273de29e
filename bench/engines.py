"""Speed on a CPU beside vLLM and llama.cpp: the same model, one thread each, in turns, CPU seconds.

    python recipes/engines/merged.py runs/smollm2-think
    for type in f32 f16 bf16 q8_0; do python LLAMA.CPP/convert_hf_to_gguf.py runs/smollm2-think --outtype $type \\
        --outfile runs/gguf/$type.gguf; done
    python bench/engines.py runs/smollm2-think runs/gguf --vllm build/engines/vllm/bin/python \\
        --llama build/engines/llama/bin/llama-server --out bench/results/engines.json

A case `16x1024` is a number of decoding steps of 16 sequences with 1,024 cached tokens each, greedy, the full cache;
`read16x1024` reads 16 such prompts. Every engine keeps keys and values as it does by default: kvatlas in float32,
beside shorter weights in bfloat16, vLLM in the type of its weights, llama.cpp in float16. Each has its cache filled
before the clock starts: kvatlas' by hand, vLLM's by its connector for that purpose, llama.cpp's by a prompt that it
reads once and restores into each slot.

Times are the processor's of the engine's process. llama.cpp is asked through its server: of a request of some tokens
that of a request of one is taken away. Engines of one type of weights live side by side, and take turns within a case.
Cases that are in the document already with as many turns are not measured again, so that the command can be repeated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol

import httpx
import torch
import transformers

from common import FilledEngine, arguments, keep, processor_seconds
from kvatlas.core import Sampling, Setting
from kvatlas.cpu import native
from kvatlas.engine import Engine, Request
from kvatlas.models import ENDLESS, ModelHandle, Options
from kvatlas.policies import from_setting

CASES = ["16x4096", "16x1024", "16x256", "1x4096", "1x1024", "1x256", "read1x1024", "read16x1024"]
RESULTS = Path(__file__).parent / "results"
#: Two runs of this program on an idle machine.
DOCUMENTS = ("engines.json", "engines_again.json")
#: Types of weights: the options of a model of ours, vLLM's name, and the GGUF files.
DTYPES: dict[str, tuple[dict[str, str], str, list[str]]] = {
    "float32": ({}, "float32", ["f32"]),
    "bfloat16": ({"weights": "bfloat16"}, "bfloat16", ["bf16", "f16"]),
    "int8": ({"weights": "int8"}, "", ["q8_0"]),
}
#: Decoding steps of a turn, by the number of sequences.
STEPS = {1: 16, 16: 8}
ROWS = 16
#: Tokens of a sequence beyond the longest context: the steps, and whole pages of each engine.
SPARE = 256


class Arm(Protocol):
    """An engine that measures a case; with 0 steps it reads the prompts."""

    def seconds(self, batch: int, context: int, steps: int) -> float: ...


def prompts_of(batch: int, context: int) -> list[list[int]]:
    """Return prompts of which no two begin with the same tokens."""
    return [[5 + (row + i * i) % 4000 for i in range(context)] for row in range(batch)]


class Ours:
    """Engines of kvatlas with the full cache."""

    def __init__(self, folder: Path, options: dict[str, str], room: int) -> None:
        self.room = room
        self.handle = ModelHandle(f"hf:{folder}", folder, Options(device="cpu", **options), overrides=ENDLESS)
        self.full = from_setting(Setting.from_parameters("full"))
        self.filled: dict[int, FilledEngine] = {}
        sampling = Sampling(temperature=0, max_new_tokens=1)
        self.reader = Engine(self.handle, self.handle.load(), [self.full], sampling, ROWS)

    def seconds(self, batch: int, context: int, steps: int) -> float:
        if not steps:
            prompts = enumerate(prompts_of(batch, context))
            requests = [Request(row, tuple(prompt), row, (self.full,)) for row, prompt in prompts]
            began = time.process_time()
            for _ in self.reader.run(requests):
                pass
            return time.process_time() - began

        if batch not in self.filled:
            sampling = Sampling(temperature=0, max_new_tokens=10**6)
            self.filled[batch] = FilledEngine(self.handle, [self.full], sampling, batch, self.room)
        engine = self.filled[batch]
        engine.put(context, self.full)
        return engine.step(steps)


class Vllm:
    """vLLM in a process of its own environment."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.questions: IO[str] = process.stdin
        self.answers: IO[str] = process.stdout

    def answer(self) -> Any:
        line = self.answers.readline()
        if not line:
            raise SystemExit("vLLM ended; its standard error says why.")
        return json.loads(line)

    def seconds(self, batch: int, context: int, steps: int) -> float:
        print(json.dumps([batch, context, steps]), file=self.questions, flush=True)
        return float(self.answer())


class Llama:
    """llama.cpp's server with a slot for each sequence."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.http = httpx.Client(base_url=url, timeout=1200)
        self.filled = 0

    def wait(self) -> None:
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self.http.get("/health").status_code == 200:
                    return
            if self.process.poll() is not None:
                raise SystemExit("llama.cpp's server ended; its standard error says why.")
            time.sleep(0.2)

    def ask(self, prompts: list[list[int]], tokens: int, **options: Any) -> float:
        """CPU seconds of a request for so many tokens behind each prompt."""
        request = {"prompt": prompts, "n_predict": tokens, "temperature": 0, "ignore_eos": True, **options}
        began = processor_seconds(self.process.pid)
        answers = self.http.post("/completion", json=request).raise_for_status().json()
        taken = processor_seconds(self.process.pid) - began
        answers = answers if isinstance(answers, list) else [answers]
        assert [answer["tokens_predicted"] for answer in answers] == [tokens] * len(prompts)
        return taken

    def fill(self, context: int) -> None:
        """Read a prompt once, and restore it into every slot."""
        prompt = prompts_of(1, context)
        self.ask(prompt, 1, id_slot=0)
        self.http.post("/slots/0?action=save", json={"filename": "filled"}).raise_for_status()
        for slot in range(1, ROWS):
            self.http.post(f"/slots/{slot}?action=restore", json={"filename": "filled"}).raise_for_status()
        self.filled = context

    def seconds(self, batch: int, context: int, steps: int) -> float:
        if not steps:
            self.filled = 0
            return self.ask(prompts_of(batch, context), 1, cache_prompt=False)
        if self.filled < context:
            self.fill(context)
        # A shorter prompt leaves the slots of the longer one shorter.
        self.filled = context
        prompts = prompts_of(1, context) * batch
        first = self.ask(prompts, 1)
        return self.ask(prompts, 1 + steps) - first


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


@contextlib.contextmanager
def engines_of(dtype: str, options: argparse.Namespace, versions: dict[str, Any]) -> Iterator[dict[str, Arm]]:
    """Start all engines for one type of weights, and end them."""
    own, vllm_dtype, files = DTYPES[dtype]
    room = max(parsed(case)[2] for case in options.cases) + SPARE
    ours = Ours(options.folder, own, room)
    # vLLM takes whole gigabytes; its cache has the type of the weights, as ours.
    space = math.ceil(ROWS * room * ours.handle.kv_bytes_per_token / 1e9)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = clean | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": str(space)}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())

        def start(*command: object, **files: Any) -> subprocess.Popen[str]:
            words = [str(word) for word in command]
            process = subprocess.Popen(words, text=True, env=environment, **files)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        # All start side by side, and none works while another one is measured.
        vllms = {}
        for mode in options.modes if vllm_dtype else []:
            program = Path(__file__).with_name("vllm_steps.py")
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            words = [options.vllm, program, options.folder, vllm_dtype, mode, ROWS, room]
            vllms[f"vLLM {mode}"] = Vllm(start(*words, **pipes))
        llamas = {}
        for name in files:
            port = free_port()
            flags = f"--host 127.0.0.1 --port {port} -np {ROWS} -c {ROWS * room} -t 1 -fa on --cache-ram 0 --no-webui"
            model = ["-m", options.ggufs / f"{name}.gguf", "--slot-save-path", folder]
            process = start(options.llama, *model, *flags.split(), stdout=subprocess.DEVNULL)
            llamas[f"llama.cpp {name}"] = Llama(process, f"http://127.0.0.1:{port}")
        for vllm in vllms.values():
            versions["vLLM"] = vllm.answer()["version"]
        for llama in llamas.values():
            llama.wait()
        yield {**vllms, **llamas, "kvatlas": ours}


def parsed(case: str) -> tuple[bool, int, int]:
    """Return whether a case reads prompts, its sequences, and the tokens of each."""
    match_ = re.fullmatch(r"(read)?(\d+)x(\d+)", case)
    if match_ is None:
        raise SystemExit(f"A case is as 16x1024 or read16x1024, not {case}.")
    return bool(match_[1]), int(match_[2]), int(match_[3])


def measured(case: str, dtype: str, arms: dict[str, Arm], turns: int) -> dict[str, Any]:
    """Measure a case in turns, after one that does not count."""
    reads, batch, context = parsed(case)
    steps = 0 if reads else STEPS.get(batch, 8)
    tokens = batch * (steps or context)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    load = os.getloadavg()[0]
    for turn in range(-1, turns):
        for name, arm in arms.items():
            taken = arm.seconds(batch, context, steps)
            if turn >= 0:
                seconds[name].append(round(taken, 4))
    own = seconds["kvatlas"]
    peers = {name: taken for name, taken in seconds.items() if name != "kvatlas"}
    return {
        "case": case,
        "weights": dtype,
        "turns": turns,
        "tokens": tokens,
        "seconds": seconds,
        "load_before": round(load, 2),
        "tokens_per_cpu_second": {name: round(tokens / min(taken), 1) for name, taken in seconds.items()},
        "median_tokens_per_cpu_second": {name: round(tokens / median(taken), 1) for name, taken in seconds.items()},
        "ratio_by_least_times": {name: round(min(taken) / min(own), 2) for name, taken in peers.items()},
        "ratio_by_medians": {name: round(median(taken) / median(own), 2) for name, taken in peers.items()},
    }


def lines() -> list[str]:
    """Return the rows of the table in bench/README.md: ratios to the faster form of each peer in both stored runs.

    Ratios that differ by more than 10 % between the runs are not quoted.
    """
    first, again = [json.loads((RESULTS / name).read_text())["results"] for name in DOCUMENTS]
    rows = []
    for entry, other in zip(first, again, strict=True):
        assert [entry["case"], entry["weights"]] == [other["case"], other["weights"]]
        cells = [entry["case"], entry["weights"], f"{entry['median_tokens_per_cpu_second']['kvatlas']:,.0f}"]
        for peer in ("vLLM", "llama.cpp"):
            ratios = [ratio_to(peer, one["median_tokens_per_cpu_second"]) for one in (entry, other)]
            if None in ratios:
                cells.append("")
            elif max(ratios) > 1.1 * min(ratios):
                cells.append("–")
            else:
                cells.append(" and ".join(f"{ratio:.2f}" for ratio in ratios))
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def ratio_to(peer: str, rates: dict[str, float]) -> float | None:
    """Return kvatlas's tokens per second over those of the faster form of a peer; None where it was not measured."""
    of_peer = [rate for name, rate in rates.items() if name.startswith(peer)]
    return rates["kvatlas"] / max(of_peer) if of_peer else None


def llama_version(server: Path) -> str:
    done = subprocess.run([str(server), "--version"], capture_output=True, text=True, check=True)
    # Built within another repository it names a commit of that.
    return (done.stdout + done.stderr).strip().splitlines()[0].split(" (")[0]


def main() -> None:
    options = arguments(
        __doc__,
        "folder",
        "ggufs",
        vllm=Path("python"),
        llama=Path("llama-server"),
        dtypes=list(DTYPES),
        cases=CASES,
        modes=["eager", "compiled"],
        turns=5,
    )
    # The engines end with this program, also with one that `timeout` ends.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("Ended; the document has the cases that are whole."))
    torch.set_num_threads(1)
    document: dict[str, Any] = {"versions": {}, "results": []}
    if options.out and options.out.exists():
        document = json.loads(options.out.read_text())
    versions, results = document["versions"], document["results"]
    versions |= {
        "llama.cpp": llama_version(options.llama),
        "transformers": transformers.__version__,
        "kernels": getattr(native.load(), "target", None),
    }
    for dtype in options.dtypes:
        done = {entry["case"] for entry in results if entry["weights"] == dtype and entry["turns"] >= options.turns}
        left = [case for case in options.cases if case not in done]
        if not left:
            continue
        with engines_of(dtype, options, versions) as arms:
            for case in left:
                results[:] = [entry for entry in results if (entry["case"], entry["weights"]) != (case, dtype)]
                results.append(measured(case, dtype, arms, options.turns))
                keep(options, bench="engines", versions=versions, results=results)
    keep(options, bench="engines", versions=versions, results=results)


if __name__ == "__main__":
    main()
