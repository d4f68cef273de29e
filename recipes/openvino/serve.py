"""A converted model behind OpenAI's chat API, by OpenVINO GenAI, with the cache eviction that a setting's file says.

    optimum-cli export openvino --model FOLDER --task text-generation-with-past --weight-format fp32 CONVERTED
    python recipes/openvino/serve.py CONVERTED --setting deploy/openvino.py --port 8000

`--setting` is what `kvatlas export-setting --to openvino` writes: Python that leaves a `scheduler_config`; without one
nothing is evicted. Tokens and the chat template are those of the tokenizer in the folder. Thinking is what ends with
`</think>`. `--property NAME=VALUE` goes to the device: by default it computes and caches in fp32, where OpenVINO's own
default on CPUs caches keys and values in eight bits. Needs `pip install 'kvatlas[openvino]'`.
"""

from __future__ import annotations

import argparse
import json
import queue
import runpy
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FP32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
#: Sampling as OpenAI's API calls it, with the type of each; what is not sent stays OpenVINO's default.
_SAMPLING = {"temperature": float, "top_p": float, "top_k": int}


class Pipeline:
    """OpenVINO's continuous batching: one thread takes in requests and steps while any is unfinished."""

    def __init__(self, folder: Path, scheduler_config: Any, properties: Mapping[str, Any]) -> None:
        import openvino_genai
        from transformers import AutoTokenizer

        self.genai = openvino_genai
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        ends = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
        self.ends = set(ends if isinstance(ends, list) else [ends])
        config = scheduler_config or openvino_genai.SchedulerConfig()
        self.batches = openvino_genai.ContinuousBatchingPipeline(folder, config, "CPU", dict(properties))
        self.waiting: queue.SimpleQueue[tuple[Sequence[int], Any, Future[Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def ask(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to a request's body, as an API answers; ValueError, KeyError or TypeError for one that is none."""
        prompt = self.tokenizer.apply_chat_template(
            [{"role": item["role"], "content": item["content"]} for item in body["messages"]],
            add_generation_prompt=True,
            return_dict=False,
        )
        result: Future[Any] = Future()
        self.waiting.put((prompt, self._sampling(body), result))
        output = result.result()
        tokens = [token for token in output.generated_ids if token not in self.ends]
        text, opened = self.tokenizer.decode(tokens), self.tokenizer.decode(prompt).rstrip().endswith("<think>")
        thinking, closed, answer = text.partition("</think>")
        if not closed and not opened:
            thinking, answer = "", text
        length = output.finish_reason == self.genai.py_openvino_genai.GenerationFinishReason.LENGTH
        return {
            "object": "chat.completion",
            "model": body.get("model"),
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "reasoning_content": thinking or None, "content": answer},
                    "finish_reason": "length" if length else "stop",
                }
            ],
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(output.generated_ids)},
        }

    def _sampling(self, body: Mapping[str, Any]) -> Any:
        config = self.genai.GenerationConfig()
        config.stop_token_ids = self.ends
        config.max_new_tokens = int(body["max_tokens"])
        config.do_sample = float(body.get("temperature", 1)) > 0
        for name, kind in _SAMPLING.items():
            if config.do_sample and body.get(name) is not None:
                setattr(config, name, kind(body[name]))
        config.rng_seed = int(body.get("seed") or 0)
        config.validate()
        return config

    def _run(self) -> None:
        running: dict[Any, Future[Any]] = {}
        number = 0
        while True:
            while not running or not self.waiting.empty():
                prompt, config, result = self.waiting.get()
                try:
                    running[self.batches.add_request(number, _tensor(prompt), config)] = result
                    number += 1
                except RuntimeError as error:
                    result.set_exception(error)
            try:
                self.batches.step()
            except RuntimeError as error:
                for result in running.values():
                    result.set_exception(error)
                running.clear()
            status = self.genai.py_openvino_genai.GenerationStatus
            for handle in [item for item in running if item.get_status() != status.RUNNING]:
                outputs = handle.read_all() if handle.get_status() == status.FINISHED else []
                if outputs:
                    running.pop(handle).set_result(outputs[0])
                else:
                    running.pop(handle).set_exception(RuntimeError("the request did not fit the cache"))


def _tensor(tokens: Sequence[int]) -> Any:
    import numpy as np

    from openvino import Tensor

    return Tensor(np.array([tokens], dtype=np.int64))


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as `verify` opens at most."""

    request_queue_size = 256


def server(name: str, ask: Any, port: int) -> Server:
    """The HTTP side: `/v1/models` and `/v1/chat/completions`, answered by `ask`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            listed = {"object": "list", "data": [{"id": name, "object": "model"}]}
            self._send(*((200, listed) if self.path == "/v1/models" else _error(404, f"There is no {self.path}.")))

        def do_POST(self) -> None:
            began = time.time()
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.path != "/v1/chat/completions":
                return self._send(*_error(404, f"There is no {self.path}."))
            try:
                body = json.loads(data)
                if body.get("stream"):
                    raise ValueError("stream is not served")
                reply = 200, {**ask(body), "id": f"chat-{began:.6f}", "created": int(began)}
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                reply = _error(400, f"This is no request of a chat: {error!r}.")
            except RuntimeError as error:
                reply = _error(500, f"OpenVINO failed: {error}")
            return self._send(*reply)

        def _send(self, code: int, body: Mapping[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return Server(("127.0.0.1", port), Handler)


def _error(code: int, text: str) -> tuple[int, Mapping[str, Any]]:
    return code, {"error": {"message": text, "code": code}}


def main() -> None:
    """Load, say where it listens, serve until it is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="A model as optimum-cli converts it.")
    parser.add_argument("--setting", type=Path, help="What export-setting wrote; default: nothing is evicted.")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one.")
    parser.add_argument("--property", action="append", default=[], metavar="NAME=VALUE", help="Of the device.")
    options = parser.parse_args()
    given = dict(item.partition("=")[::2] for item in options.property)
    config = runpy.run_path(str(options.setting))["scheduler_config"] if options.setting else None
    pipeline = Pipeline(options.folder, config, FP32 | given)
    http = server(options.folder.resolve().name, pipeline.ask, options.port)
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=http.shutdown).start())
    print(f"Serving http://127.0.0.1:{http.server_port}", flush=True)
    http.serve_forever()


if __name__ == "__main__":
    main()
