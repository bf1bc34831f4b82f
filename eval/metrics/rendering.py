"""Answers as pictures or sound, by a function of the user's that takes an answer and returns a data URL (`render`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from configs.runtime.errors import InputError, first_line
from configs.schema.evaluation import EvalConfig
from eval.decoder.records import AUTOREGRESSIVE, FAILED, SPECULATIVE
from eval.metrics.likelihood import pair_answers
from eval.metrics.scorers import import_function
from eval.metrics.tally import Tally
from heads.frozen.loading import Target


class Rendering:
    """The renderer of one evaluation, found before it decodes.

    Raises:
        InputError: it cannot be imported, or is no function.
    """

    def __init__(self, config: EvalConfig) -> None:
        self.name, self.most = config.render, config.num_rendered
        self.function = None if self.name is None else import_function(self.name, "render")

    def of(self, target: Target, records: Tally, texts: Mapping[str, str]) -> list[dict[str, str]]:
        """Return the first prompts' plain and speculative answers, rendered; nothing where no function is named."""
        if self.function is None:
            return []
        pairs = pair_answers(records.of(AUTOREGRESSIVE), records.of(SPECULATIVE))
        complete = [
            pair for pair in pairs if not FAILED.intersection(answer.stop_reason for answer in pair) and not pair[0].turn
        ]
        rendered = []
        for pair in complete[: self.most]:
            plain, speculative = (str(target.tokenizer.decode(list(each.tokens), skip_special_tokens=True)) for each in pair)
            urls = {AUTOREGRESSIVE: self._url(plain), SPECULATIVE: self._url(speculative)}
            rendered.append({"prompt_id": pair[0].prompt_id, "prompt": texts[pair[0].prompt_id], **urls})
        return rendered

    def _url(self, answer: str) -> str:
        try:
            url: Any = self.function(answer) if self.function is not None else None
        except Exception as error:  # the user's function, which may fail in any way
            raise InputError(f"render: {self.name} failed: {type(error).__name__}: {first_line(error)}") from error
        if not isinstance(url, str) or not url.startswith("data:"):
            raise InputError(f"render: {self.name} must return a data URL of a picture or of sound, got {str(url)[:40]!r}")
        return url
