"""What the answers of an evaluation are judged by, beside their speed. Imports no torch.

Speculative decoding that is lossless changes no answer's worth; a lossy mode may, and is refused without a judge.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import field_validator, model_validator

from configs.settings import Settings


class QualityConfig(Settings):
    """Score plain and speculative answers to the same prompts, and compare them prompt by prompt."""

    perplexity: bool = True  # of the answers, under the target's own law at temperature 1
    # gsm8k: the last number of an answer, or the one it marks as final, equals the reference's. Every prompt needs a reference.
    exact_match: Literal["gsm8k"] | None = None
    # Functions of your own, as package.module.function: (prompt, answer, reference or None) -> number, larger is better.
    # Importable from the checkout's root, from PYTHONPATH, or installed.
    scorers: list[str] = []

    @field_validator("scorers")
    @classmethod
    def _are_dotted_and_different(cls, paths: list[str]) -> list[str]:
        for path in paths:
            if "." not in path or not all(part.isidentifier() for part in path.split(".")):
                raise ValueError(f"a scorer is named as package.module.function, got {path!r}")
        if len(set(paths)) < len(paths):
            raise ValueError(
                f"scorers are listed twice: {', '.join(sorted({each for each in paths if paths.count(each) > 1}))}"
            )
        return paths

    @model_validator(mode="after")
    def _judges_something(self) -> Self:
        if not self.perplexity and self.exact_match is None and not self.scorers:
            raise ValueError("quality judges nothing: turn perplexity on, or give exact_match or scorers; null turns it off")
        return self


def refuse_unjudged_loss(lossy: str | None, quality: QualityConfig | None) -> None:
    """Refuse a way of decoding that changes answers on purpose where nothing says what they are worth afterwards.

    Args:
        lossy: the kind of such a way; None: decoding is lossless.
        quality: the judges.

    Raises:
        ValueError: they are off.
    """
    if lossy is not None and quality is None:
        raise ValueError(
            f"decode.lossy {lossy} changes answers, and nothing judges them: set quality (quality.perplexity=true or more), or "
            "decode.lossy to null"
        )
