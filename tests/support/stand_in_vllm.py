"""Stands in for `vllm serve TARGET --speculative-config ...`: the endpoints that a check asks, and vLLM's way of counting.

`answers.json` beside the target has, by a chat's last message, the ids of the prompt and of the target's greedy answer. A file
`behaviour` in the draft's folder, or the target's where that is served alone, makes it misbehave; `processes` beside these
folders gets the ids of the server and of a child of it that does not end when asked to.
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
WRONG_AT = 3  # in answers to chats that end with a question mark
CHANGED = {"tie": lambda token: token ^ 1, "wrong": lambda token: (token + 20) % 60}  # tokens 2n and 2n + 1 always tie
options = dict(zip(sys.argv[3::1], sys.argv[4::1], strict=False))
draft = json.loads(options.get("--speculative-config", "null"))
said = Path(sys.argv[2] if draft is None else draft["model"], "behaviour")
behaviour = said.read_text() if said.exists() else ""
drafts = draft["num_speculative_tokens"] if draft is not None else 0
rounds, accepted = 0, [0] * drafts


def answer(body):
    """Return the tokens of an answer in the pieces in which they are committed, and count."""
    global rounds
    said = body["messages"][-1]["content"]
    tokens = answers[said]["tokens"][: body["max_tokens"]]
    if behaviour in CHANGED and said.endswith("?"):
        tokens[WRONG_AT:] = map(CHANGED[behaviour], tokens[WRONG_AT:])
    if body["temperature"]:  # other tokens than the greedy ones
        tokens = [(token + 20) % 60 for token in tokens]
    pieces, tokens = [tokens[:1]], tokens[1:]
    while tokens:
        useless = behaviour == "useless" or (behaviour == "useless when sampled" and body["temperature"])
        stay = 0 if useless else min(rounds % (drafts + 1), len(tokens) - 1)
        pieces.append(tokens[: stay + 1])
        tokens = tokens[stay + 1 :]
        rounds += 1
        accepted[:stay] = [count + 1 for count in accepted[:stay]]
    return pieces


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
    def parse_request(self):
        """Refuse requests to the API without the key, where there is one."""
        key = os.environ.get("VLLM_API_KEY")
        if not super().parse_request():
            return False
        if key and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {key}":
            self.send_error(401)
            return False
        return True

    def do_GET(self):
        content = {"/health": "", "/metrics": metrics(), "/v1/models": json.dumps({"data": [{"id": "m"}]})}[self.path]
        self.send_response(503 if behaviour == "hangs" else 200)
        self.end_headers()
        self.wfile.write(content.encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        assert (body["stream"], body["return_token_ids"], body["model"]) == (True, True, "m")
        assert (body["temperature"], body["top_p"], body["top_k"]) in ((0, 1, -1), (0.7, 0.9, -1))
        if behaviour == "dies":
            os._exit(9)
        self.send_response(200)
        self.end_headers()
        prompt = answers[body["messages"][-1]["content"]]["prompt"]
        for piece in answer(body):
            chunk = {"choices": [{"delta": {"content": "a"}, "token_ids": piece}], "prompt_token_ids": prompt}
            prompt = None  # it comes once
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.002)
        self.wfile.write(b'data: {"choices": []}\n\ndata: [DONE]\n\n')

    def log_message(self, *arguments):
        pass


if sys.argv[1] != "serve" or not Path(sys.argv[2]).is_dir():
    sys.exit(f"no target {sys.argv[1:3]}")
answers = json.loads(Path(sys.argv[2]).with_name("answers.json").read_text())
child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
child.stdout.readline()
with Path(sys.argv[2]).with_name("processes").open("a") as file:
    file.write(f"{os.getpid()} {child.pid}\n")
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if behaviour == "refused":
    raise ValueError("the draft has 3 taps, and the target 2 blocks")
print(f"serving {sys.argv[2:]}", flush=True)
ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Handler).serve_forever()
