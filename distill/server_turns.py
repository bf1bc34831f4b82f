"""Self-seeded prompts by a server: user turns that it writes behind the chat template's opening of one.

The same turns by number as far as their settings go, with the same rules of which can be used (`distill.self_seeding`); each is
a request with a seed of its own, and is kept as it comes. Left out on purpose: templates that end a user's turn by plain text,
and servers that return text, which show no special token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from configs.decoding import SamplingConfig
from configs.errors import InputError
from configs.progress import progress
from configs.schema import PromptsConfig
from distill.answers import request_number
from distill.asking import ask_all, naming
from distill.partial import PartialFile, fingerprint
from distill.self_seeding import Turn, UserFrame, read_turn
from distill.server_writing import ServerWriter, read_ids

TURN_PIECES = ".turns.partial-{rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class ServerTurns:
    """Writes turns by asking a server.

    Args:
        writer: asks it.
        config: how long turns are, and how random.
        folder: takes the turns that were written.
        rank: of this process.
    """

    writer: ServerWriter
    config: PromptsConfig
    folder: Path
    rank: int

    def __call__(self, frame: UserFrame, numbers: Sequence[int]) -> Iterator[Turn]:
        """Yield the turns asked for, those written before among them, in the order of their numbers.

        Raises:
            InputError: the template ends a user's turn by plain text, or see `distill.asking.ask_all`.
        """
        if not frame.end_ids:
            raise InputError(
                f"the chat template of target {self.writer.target.identity.name} ends a user's turn by plain text, which a "
                "server cannot be asked to stop at: give prompts.source file or dataset"
            )
        job = fingerprint(self.writer.asked(), self.config.model_dump(exclude={"num_prompts", "category"}))
        found = sorted(self.folder.glob(TURN_PIECES.format(rank="*")))
        texts = {key: text for path in found for key, text in PartialFile(path, job).read().items()}
        missing = {str(number): number for number in numbers if str(number) not in texts}
        pieces = PartialFile(self.folder / TURN_PIECES.format(rank=self.rank), job)
        with progress("turns asked for", len(missing), "turns") as advance:

            def keep(key: str, text: str | None) -> None:
                texts[key] = text
                pieces.append(key, text)
                advance(1)

            ask_all(
                self.writer.server.connection,
                missing,
                lambda number: self._write(frame, number),
                keep,
                failures_in_a_row=self.writer.config.failures_in_a_row,
            )
        return ((number, texts[str(number)]) for number in numbers)

    def _write(self, frame: UserFrame, number: int) -> str | None:
        """Return the text of a turn, None where it is of no use."""
        target, limit = self.writer.target, self.config.max_prompt_tokens
        if len(frame.prefix_ids) + limit > self.writer.max_positions:
            raise InputError(
                f"prompts.max_prompt_tokens: {limit} tokens after the chat template's {len(frame.prefix_ids)} do not fit the "
                f"server's context of {self.writer.max_positions}"
            )
        sampling = SamplingConfig(temperature=self.config.temperature, top_p=self.config.top_p)
        end_ids = sorted({*frame.end_ids, *target.eos_token_ids})
        asking = replace(self.writer, sampling=sampling)
        with naming(f"self-seeded turn {number}"):
            completion = asking.ask(frame.prefix_ids, request_number(f"self-{number}"), limit, end_ids=end_ids)
        ids = read_ids(completion, limit, end_ids, target.vocab_size, f"server.url: {self.writer.config.url}")
        return read_turn(target, frame, ids)
