"""Files that somebody else made: damaged stores, folders of models, logs of Inspect."""

from __future__ import annotations

import json
import math
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from attacks.commands import call

#: Marks of templates that are to be refused.
TEMPLATES = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "division by zero": "{{ 1 / 0 }}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "an attribute of Python": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a text of 10^9 characters": "{{ 'x' * 1000000000 }}",
    "no template": "{% for %}",
}


def stores(run: Path, scratch: Path, count: int) -> Iterator[tuple[str, str]]:
    """Finished runs with bytes overwritten or cut off, read by two commands: the name of each, and what is wrong."""
    rng, whole = random.Random(0), (run / "run.sqlite").read_bytes()
    wanted = call(("export", str(run), "--format", "jsonl", "--out", str(scratch / "whole.jsonl")))
    assert wanted.code == 0, wanted.said
    for number in range(count):
        data = bytearray(whole)
        if number % 4:
            position, size = rng.randrange(100, len(data) - 400), rng.choice([1, 20, 400])
            data[position : position + size] = rng.randbytes(size)
        else:
            data = data[: rng.randrange(len(data))]
        folder = scratch / f"damaged-{number}"
        folder.mkdir()
        (folder / "run.sqlite").write_bytes(data)
        yield f"describe {number}", call(("describe", str(folder))).fault(0, 2)
        out = scratch / f"{number}.jsonl"
        result = call(("export", str(folder), "--format", "jsonl", "--out", str(out)))
        # Exit code 0 is right only with all that was written.
        wrong = result.code == 0 and out.read_bytes() != (scratch / "whole.jsonl").read_bytes()
        yield f"export {number}", "other traces than were written" if wrong else result.fault(0, 2)
        shutil.rmtree(folder)


def folders(scratch: Path) -> Iterator[tuple[str, str]]:
    """Folders of models that are damaged or mean harm."""
    from kvatlas import models

    source = models.find("embedded:tiny-llama").folder
    for name, harm in _harms():
        folder = scratch / name.replace(" ", "-")
        shutil.copytree(source, folder)
        harm(folder)
        words = ("run", f"hf:{folder}", "CHAIN3", "--problems", "1", "--max-new-tokens", "20", "--quiet")
        yield name, call((*words, "--workers", "1"), folder=folder).fault(2)


def _harms() -> Iterator[tuple[str, Callable[[Path], None]]]:
    def tensors(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
        def harm(folder: Path) -> None:
            from safetensors.torch import load_file, save_file

            (file,) = folder.glob("model*.safetensors")
            weights = load_file(file)
            change(weights)
            save_file(weights, file, metadata={"format": "pt"})

        return harm

    def first(weights: dict[str, object]) -> str:
        return next(name for name in weights if name.endswith("up_proj.weight"))

    for value in (math.nan, math.inf):
        yield f"a weight is {value}", tensors(lambda weights, value=value: weights[first(weights)].fill_(value))
    yield "a tensor is missing", tensors(lambda weights: weights.__delitem__(first(weights)))

    def code(folder: Path) -> None:
        (folder / "own.py").write_text("open('executed', 'w').close()\nclass Own: pass\n")
        for file in ("tokenizer_config.json", "config.json"):
            data = json.loads((folder / file).read_text())
            data["auto_map"] = {"AutoTokenizer": ["own.Own", None], "AutoModelForCausalLM": "own.Own"}
            (folder / file).write_text(json.dumps(data | {"tokenizer_class": "Own", "architectures": ["Own"]}))

    yield "code beside the weights", code

    def pickled(folder: Path) -> None:
        (file,) = folder.glob("model*.safetensors")
        file.unlink()
        body = b"cos\nsystem\n(S'touch executed'\ntR."
        (folder / "pytorch_model.bin").write_bytes(body)

    yield "pickled weights", pickled
    for name, text in TEMPLATES.items():

        def template(folder: Path, text: str = text) -> None:
            for file in folder.glob("chat_template*"):
                file.unlink()
            data = json.loads((folder / "tokenizer_config.json").read_text())
            (folder / "tokenizer_config.json").write_text(json.dumps(data | {"chat_template": text}))

        yield f"template with {name}", template
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        for what, text in (("empty", ""), ("deep", "[" * 100_000), ("a number", "3")):

            def broken(folder: Path, file: str = file, text: str = text) -> None:
                (folder / file).write_text(text)

            yield f"{file} is {what}", broken


def logs(scratch: Path) -> Iterator[tuple[str, str]]:
    """Logs that are damaged or too much."""
    for name, make in _logs():
        path = scratch / f"{name.replace(' ', '-')}.eval"
        make(path)
        yield name, call(("import", str(path), "{out}")).fault(2)


def _logs() -> Iterator[tuple[str, Callable[[Path], None]]]:
    def archive(**members: str | bytes) -> Callable[[Path], None]:
        def make(path: Path) -> None:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as log:
                for name, content in members.items():
                    log.writestr(name.replace("__", "/"), content)

        return make

    def bomb(path: Path) -> None:
        with (
            zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as log,
            log.open("header.json", "w", force_zip64=True) as member,
        ):
            for _ in range(2048):
                member.write(bytes(2**20))

    yield "2 GB in 2 MB", bomb
    yield "no archive", lambda path: path.write_bytes(b"PK\3\4" + bytes(100)) and None
    yield "empty", lambda path: path.write_bytes(b"") and None
    yield "archive of nothing", archive()
    yield "header is no JSON", archive(**{"header.json": "{"})
    yield "header is deep", archive(**{"header.json": "[" * 100_000})
    yield "header of another program", archive(**{"header.json": '{"a": 1}'})
    yield "binary", lambda path: path.write_bytes(random.Random(1).randbytes(5000)) and None
