"""Stands in for the `openai` package, as far as a check uses it: chat completions, streamed."""

import json
import urllib.request
from types import SimpleNamespace


class OpenAIError(Exception):
    """What goes wrong in asking."""


class OpenAI:
    def __init__(self, *, base_url, api_key, timeout, max_retries):
        assert (api_key, max_retries) == ("none", 0)
        self.url, self.timeout = base_url, timeout
        self.models = SimpleNamespace(list=lambda: parse(self._open("models").read()))
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=self._create))

    def _create(self, *, extra_body, **body):
        for line in self._open("chat/completions", json.dumps({**body, **extra_body}).encode()):
            if line.startswith(b"data: {"):
                yield parse(line.removeprefix(b"data: "))

    def _open(self, path, body=None):
        try:
            return urllib.request.urlopen(f"{self.url}/{path}", body, timeout=self.timeout)
        except OSError as error:
            raise OpenAIError(f"cannot be reached\n({error})") from error


def parse(text):
    return json.loads(text, object_hook=lambda values: SimpleNamespace(**values))
