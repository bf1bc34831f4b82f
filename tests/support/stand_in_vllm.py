"""Stands in for `vllm serve TARGET --speculative-config ...`: the endpoints that a check asks, and vLLM's way of counting.

A file `behaviour` in the draft's folder makes it misbehave; `processes` beside that folder gets the ids of the server and of a
child of it that does not end when asked to.
"""

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
VOCABULARY, WRONG_AT = 50, 3
options = dict(zip(sys.argv[3::1], sys.argv[4::1], strict=False))
draft = json.loads(options.get("--speculative-config", "null"))
behaviour = ""
if draft is not None and (said := Path(draft["model"], "behaviour")).exists():
    behaviour = said.read_text()
drafts = draft["num_speculative_tokens"] if draft is not None else 0
rounds, accepted = 0, [0] * drafts


def answer(body):
    """Return the tokens of an answer in the pieces in which they are committed, and count."""
    global rounds
    first = len(body["messages"][-1]["content"])
    tokens = [(first + 7 * place) % VOCABULARY for place in range(body["max_tokens"])]
    if behaviour in ("wrong", "tie") and first % 2:
        tokens[WRONG_AT:] = [(token + 1) % VOCABULARY for token in tokens[WRONG_AT:]]
    pieces, tokens = [tokens[:1]], tokens[1:]
    while tokens:
        stay = 0 if behaviour == "useless" else min(rounds % (drafts + 1), len(tokens) - 1)
        pieces.append(tokens[: stay + 1])
        tokens = tokens[stay + 1 :]
        rounds += 1
        accepted[:stay] = [count + 1 for count in accepted[:stay]]
    return pieces


def alternatives(token):
    """Return log-probabilities as the API lists them: of the token, and of the one that it stands in place of."""
    likely = {token: -0.7, (token - 1) % VOCABULARY: -0.705 if behaviour == "tie" else -3.0}
    return {"top_logprobs": [{"token": f"token_id:{each}", "logprob": value} for each, value in likely.items()]}


def metrics():
    name = "vllm:spec_decode_num"
    labels = 'engine="0",model_name="m"'
    lines = [f"# HELP {name}_drafts Rounds.", f"{name}_drafts_total{{{labels}}} {float(rounds)}"]
    lines += [f"{name}_draft_tokens_total{{{labels}}} {float(rounds * drafts)}"]
    lines += [f"{name}_accepted_tokens_total{{{labels}}} {float(sum(accepted))}"]
    lines += [f"{name}_drafts_created{{{labels}}} 1.7e+09"]
    lines += [
        f'{name}_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {float(count)}'
        for place, count in enumerate(accepted)
    ]
    return "\n".join(lines if draft is not None else ['vllm:num_requests_running{engine="0"} 0.0']) + "\n"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        content = {"/health": "", "/metrics": metrics(), "/v1/models": json.dumps({"data": [{"id": "m"}]})}[self.path]
        self.send_response(503 if behaviour == "hangs" else 200)
        self.end_headers()
        self.wfile.write(content.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        assert (body["temperature"], body["stream"], body["return_token_ids"], body["model"]) == (0, True, True, "m")
        if behaviour == "dies":
            os._exit(9)
        self.send_response(200)
        self.end_headers()
        for piece in answer(body):
            logprobs = {"content": [alternatives(token) for token in piece]} if body.get("logprobs") else None
            chunk = {"choices": [{"delta": {"content": "a"}, "token_ids": piece, "logprobs": logprobs}]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.002)
        self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    def log_message(self, *arguments):
        pass


if sys.argv[1] != "serve" or not Path(sys.argv[2]).is_dir():
    sys.exit(f"no target {sys.argv[1:3]}")
child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
child.stdout.readline()
with Path(sys.argv[2]).with_name("processes").open("a") as file:
    file.write(f"{os.getpid()} {child.pid}\n")
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if behaviour == "refused":
    raise ValueError("the draft has 3 taps, and the target 2 blocks")
print(f"serving {sys.argv[2:]}", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
