"""A server with OpenAI's addresses and many faults: `python fake_server.py --port P [--mode MODE ...]`.

Each answer is the text of its question in capital letters, with the seed and the arguments after it.
"""

import argparse
import json
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--host", default="127.0.0.1")
parser.add_argument("--mode", action="append", default=[])
parser.add_argument("--seconds", type=float, default=0.0, help="of loading")
parser.add_argument("--answer-seconds", type=float, default=0.0)
parser.add_argument("--answers", type=int, default=10**9, help="after which it dies")
parser.add_argument("--log-bytes", type=int, default=0)
parser.add_argument("--say", default="")
parser.add_argument("--model", default="fake")
parser.add_argument("--kv-cache-dtype", default="auto")
parser.add_argument("--api-key", default="")
parser.add_argument("--pid-file", type=Path)
options = parser.parse_args()
answers_left = [options.answers]
lock = threading.Lock()
told_key = f" {options.api_key}" if "tells-key" in options.mode else ""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass

    def send_json(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if options.api_key and self.headers.get("Authorization") != f"Bearer {options.api_key}":
            self.send_json({"error": "wrong key"}, 401)
        elif "never-ready" in options.mode:
            self.send_json({"error": "loading"}, 503)
        elif self.path == "/version":
            self.send_json({"version": f"1.2.3{told_key}"})
        elif self.path == "/v1/models":
            row = {"id": options.model, "max_model_len": 4096, "root": f"{Path.cwd()}{told_key}"}
            rows = [] if "no-model" in options.mode else [row]
            if "more-models" in options.mode:
                rows.insert(0, {"id": "another"})
            self.send_json({"data": rows})
        else:
            self.send_json({}, 200 if self.path == "/health" else 404)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with lock:
            answers_left[0] -= 1
            if answers_left[0] < 0:
                print("the engine died", flush=True)
                os._exit(9)
        if "then-500" in options.mode:
            self.send_json({"error": "the engine died"}, 500)
            return
        time.sleep(options.answer_seconds)
        question = request["messages"][-1]["content"]
        if "no-top-k" in options.mode and "top_k" in request:
            self.send_json({"error": "unknown field top_k"}, 400)
            return
        if "short-prompts" in options.mode and len(question) > 20:
            self.send_json({"error": "the prompt is too long for this cache"}, 400)
            return
        seed = 0 if "constant" in options.mode else request.get("seed")
        text = f"{question.upper()} {seed} {options.kv_cache_dtype}"
        finish = "error" if "odd-finish" in options.mode else "stop"
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish}
        # Another dtype may come with another template.
        prompt_tokens = len(question.split()) + (options.kv_cache_dtype == "longer")
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(text.split())}
        model = "stranger" if "hands-on" in options.mode else options.model
        about = {"model": model, "system_fingerprint": f"fp{told_key}"}
        self.send_json({**about, "choices": [choice], "usage": usage})


def sleeping_child(**how: Any) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], **how)


class Server(ThreadingHTTPServer):
    request_queue_size = 128
    allow_reuse_address = True
    allow_reuse_port = "reuse-port" in options.mode

    def server_bind(self) -> None:
        # Without asking for the name of the host, which may take seconds.
        socketserver.TCPServer.server_bind(self)


if options.say:
    print(options.say, flush=True)
if "ends-at-once" in options.mode:
    print("ValueError: fp9 is no dtype", file=sys.stderr)
    sys.exit(2)
if "ignores-sigterm" in options.mode:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if "forks" in options.mode:
    sleeping_child()
if "forks-out" in options.mode:
    if os.fork():
        time.sleep(600)
    os.setsid()
if options.pid_file:
    options.pid_file.write_text(str(os.getpid()))
if "holds-port" in options.mode:
    # As vLLM does while it loads: bound, and not listening.
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((options.host, options.port))
for _ in range(options.log_bytes // 1_000):
    sys.stdout.write("x" * 999 + "\n")
time.sleep(options.seconds)
print("listens", flush=True)
Server((options.host, options.port), Handler).serve_forever()
