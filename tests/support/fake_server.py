"""A small OpenAI-compatible server of one target, in a thread, which can be told to misbehave."""

import json
import socket
import struct
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from configs.schema.decoding import SamplingConfig
from tests.support.writing import continue_tokens


class Api:
    """What the server says. Its attributes may be set at any time, `model`, which says the log-probabilities, too."""

    def __init__(self, target):
        self.target, self.model = target, target.model
        self.name = "tiny"
        # Of the next answers, instead of what was asked for: (status, headers), or one of `cut`, `cut without length`,
        # `reset`, `hang` and `garbage`.
        self.troubles = []
        self.spoil = lambda answer, asked: answer
        self.key = None
        self.asked = []  # bodies of the completions answered
        self.released = threading.Event()  # ends what hangs
        self.lock = threading.Lock()

    def respond(self, path, headers, body):
        """Return status, headers and JSON of an answer, or the name of a trouble."""
        with self.lock:
            trouble = self.troubles.pop(0) if self.troubles else None
        if isinstance(trouble, str):
            return trouble
        if trouble is not None:
            return *trouble, {"error": {"message": "overloaded"}}
        if self.key is not None and headers.get("Authorization") != f"Bearer {self.key}":
            return 401, {}, {"error": "Unauthorized"}
        if path == "/v1/models":
            return 200, {}, {"object": "list", "data": [{"id": self.name, "object": "model"}]}
        if path != "/v1/completions":
            return 404, {}, {"detail": "Not Found"}
        try:
            return 200, {}, self.spoil(self.complete(body), body)
        finally:
            with self.lock:
                self.asked.append(body)

    def complete(self, body):
        """Answer as vLLM does: the likeliest tokens of each position and the one that follows, by id; or a continuation."""
        ids = body["prompt"]
        ours = body.get("prompt_logprobs")
        choice = {"index": 0, "text": "", "logprobs": None, "prompt_logprobs": None}
        usage = {"prompt_tokens": len(ids)}
        if ours:
            distributions = self.distributions(ids, ours)
            choice["prompt_logprobs"] = [
                distribution and {str(i): {"logprob": p, "rank": 1} for i, p in distribution.items()}
                for distribution in distributions
            ]
            choice["prompt_token_ids"] = ids
        if "stop_token_ids" in body:
            choice |= self.continuation(body)
        return {"model": body["model"], "choices": [choice], "usage": usage, "system_fingerprint": "fp-1"}

    def continuation(self, body):
        """Continue a prompt by the target's distribution, with random numbers of the request's own."""
        distribution = SamplingConfig(
            temperature=body["temperature"],
            top_p=body["top_p"] if body["top_p"] < 1 else None,
            top_k=body["top_k"] if body["top_k"] > 0 else None,
        )
        with self.lock:
            [written] = continue_tokens(
                self.target, [body["prompt"]], distribution, max_new_tokens=body["max_tokens"], seed=body["seed"], requests=[0]
            )
        ended = written[-1] in self.target.eos_token_ids
        text = self.target.tokenizer.decode(written[:-1] if ended else written)
        return {
            "text": text,
            "token_ids": written,
            "prompt_token_ids": body["prompt"],
            "finish_reason": "stop" if ended else "length",
        }

    @torch.no_grad()
    def distributions(self, ids, k):
        """Return, from the second token on, the log-probabilities of the token that follows and of the k likeliest."""
        log_p_TV = self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        rows = [dict.fromkeys([token, *row.topk(k).indices.tolist()]) for token, row in zip(ids[1:], log_p_TV, strict=False)]
        return [None, *({i: float(row[i]) for i in kept} for kept, row in zip(rows, log_p_TV, strict=False))]


@contextmanager
def serving(served):
    """Run the server of an `Api` while the block lasts; gives it its `url`."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            outcome = served.respond(self.path, self.headers, body)
            if isinstance(outcome, str):
                self.misbehave(outcome)
                return
            status, headers, content = outcome
            self.say(status, headers, json.dumps(content).encode())

        def say(self, status, headers, payload):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(payload)

        def misbehave(self, how):
            half = b'{"choices": [{"text": "hal'
            if how == "hang":
                served.released.wait(10)
            elif how == "garbage":
                self.say(200, {}, b"<html>busy</html>")
            elif how == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            else:
                self.say(200, {"Content-Length": "500"} if how == "cut" else {}, half)

        do_GET = do_POST = answer

        def log_message(self, *arguments):
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request, client_address):
            pass  # clients that gave up, and connections reset on purpose

    with Server(("127.0.0.1", 0), Handler) as http:
        served.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            served.released.set()
            http.shutdown()
            thread.join()
