"""The target writes: batched continuation of token ids, and the answers to prompts made of it.

Logits become tokens by the same distribution, random streams and cache as in the decoder (`heads.sampling.probabilities`,
`heads.sampling.counter_rng`, `heads.inference.kv_cache`), so that what a draft learns is exactly what it will be measured on.
transformers' `generate` is not used: settings left open are filled from the checkpoint's own generation config (top-k 50, a
repetition penalty, ...).

Batches are formed from all prompts before any process takes its part: the rows are the same however many processes share
the work, and however often it was interrupted.
B batch, T positions, D width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.runtime.progress import progress
from configs.runtime.resumable import Journal
from configs.schema.data import AnswersConfig
from configs.schema.decoding import SamplingConfig
from distill.dataset.conversations import Conversation, Message
from distill.generation.prompts import Prompt
from heads.inference.causal_lm import forward_rows, head_logits, new_cache
from heads.inference.kv_cache import RowCache
from heads.sampling.counter_rng import Role, Streams
from heads.sampling.probabilities import draw, token_probabilities
from heads.target.loading import Target

EMPTY = "empty_answer"  # it ended at once
NO_ROOM = "no_room_in_context"  # a later turn, with all before it, fills the context; or any the server's shorter one
UNREACHED = "turn_after_a_dropped_one"

# Continues prompts of token ids, whose requests are numbered; a reason where there is no continuation.
Write = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[list[int] | str]]

PIECES = ".answers.partial-{rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Answered:
    """Conversations in the order of their prompts, how many turns were dropped, by reason, and the servers that answered."""

    conversations: tuple[Conversation, ...]
    dropped: dict[str, int]
    servers: tuple[dict[str, Any], ...] = ()  # each of them once, as the manifest describes it


@dataclass(frozen=True, kw_only=True)
class AnswerJob:
    """Prompts to be answered by one or several processes, each of which keeps its finished batches in `folder`."""

    target: Target
    prompts: Sequence[Prompt]
    config: AnswersConfig
    seed: int
    folder: Path
    fingerprint: str

    def work(self, *, rank: int, num_processes: int) -> None:
        """Answer this process's share of the batches, all but those answered before."""
        batches = self._batches()
        mine = range(rank, len(batches), num_processes)
        done = self._finished()
        pieces = Journal(self.folder / PIECES.format(rank=rank), self.fingerprint)
        with progress("answers", sum(len(batches[number]) for number in mine), "prompts") as advance:
            for number in mine:
                if str(number) not in done:
                    pieces.append(str(number), self._answer(batches[number]))
                advance(len(batches[number]))

    def collect(self) -> Answered:
        """Return what all processes wrote.

        Raises:
            RuntimeError: a batch is missing, so a process has not finished.
        """
        finished = self._finished()
        missing = [number for number in range(len(self._batches())) if str(number) not in finished]
        if missing:
            raise RuntimeError(f"{len(missing)} batches of answers are missing in {self.folder}, the first is {missing[0]}")
        order = {prompt.prompt_id: place for place, prompt in enumerate(self.prompts)}
        rows = [Conversation.from_dict(row, "a finished batch") for piece in finished.values() for row in piece["rows"]]
        dropped = Counter[str]()
        for piece in finished.values():
            dropped.update(piece["dropped"])
        rows.sort(key=lambda row: (order[row.prompt_id], row.turn))
        servers = {str(server): server for piece in finished.values() for server in piece.get("servers", ())}
        return Answered(
            conversations=tuple(rows),
            dropped=dict(sorted(dropped.items())),
            servers=tuple(servers[each] for each in sorted(servers)),
        )

    def _batches(self) -> list[list[Prompt]]:
        """Return the prompts, those of similar length together: less padding, and rows that end at similar times."""
        by_length = sorted(self.prompts, key=lambda prompt: (len(prompt.user_text), prompt.prompt_id))
        size = self.config.batch_size
        return [by_length[start : start + size] for start in range(0, len(by_length), size)]

    def _finished(self) -> dict[str, Any]:
        """Return the batches on disk, whichever process wrote them."""
        found = sorted(self.folder.glob(PIECES.format(rank="*")))
        return {key: piece for path in found for key, piece in Journal(path, self.fingerprint).read().items()}

    def _answer(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        rows, dropped = answer_prompts(self.target, prompts, self.config, seed=self.seed)
        return {"rows": [asdict(row) for row in rows], "dropped": dropped}


def answer_prompts(
    target: Target, prompts: Sequence[Prompt], config: AnswersConfig, *, seed: int, write: Write | None = None
) -> tuple[list[Conversation], dict[str, int]]:
    """Answer a batch of prompts turn by turn, each later turn after the target's own answers to those before.

    Args:
        target: whose template and end-of-text tokens count.
        prompts: what is answered.
        config: how the target here writes.
        seed: names the random numbers, see `continue_tokens`.
        write: writes in place of the target here.

    Returns:
        One conversation for each answered turn, and how many turns were dropped, by reason.
    """

    def write_here(prompts_ids: Sequence[Sequence[int]], requests: Sequence[int]) -> list[list[int]]:
        limit = config.max_new_tokens
        return continue_tokens(target, prompts_ids, config, max_new_tokens=limit, seed=seed, requests=requests)

    conversations: list[Conversation] = []
    dropped = Counter[str]()
    open_rows = [(prompt, list(prompt.history)) for prompt in prompts]
    turn = 0
    while open_rows:
        messages = [[*said, {"role": "user", "content": prompt.turns[turn]}] for prompt, said in open_rows]
        answered = _answer_turn(target, [prompt for prompt, _ in open_rows], messages, turn, write or write_here)
        still_open = []
        for (prompt, _), outcome in zip(open_rows, answered, strict=True):
            num_left = len(prompt.turns) - turn - 1
            if isinstance(outcome, str):
                dropped.update({outcome: 1, UNREACHED: num_left})
                continue
            conversations.append(outcome)
            if num_left:
                still_open.append((prompt, list(outcome.messages)))
        open_rows = still_open
        turn += 1
    return conversations, {reason: count for reason, count in dropped.items() if count}


def _answer_turn(
    target: Target,
    prompts: Sequence[Prompt],
    messages: Sequence[list[Message]],
    turn: int,
    write: Write,
) -> list[Conversation | str]:
    """Return each prompt's answered turn, or the reason why there is none."""
    encoded = [tuple(target.encode_chat(conversation)) for conversation in messages]
    fitting = [index for index, ids in enumerate(encoded) if len(ids) < target.max_positions]
    requests = [request_number(f"{prompts[index].prompt_id}/{turn}") for index in fitting]
    answers = write([encoded[index] for index in fitting], requests)
    outcomes: list[Conversation | str] = [NO_ROOM] * len(prompts)
    for index, answer_ids in zip(fitting, answers, strict=True):
        if isinstance(answer_ids, str):
            outcomes[index] = answer_ids
            continue
        ended = answer_ids[-1] in target.eos_token_ids
        if ended and len(answer_ids) == 1:
            outcomes[index] = EMPTY
            continue
        text = str(target.tokenizer.decode(answer_ids, skip_special_tokens=True))
        outcomes[index] = Conversation(
            prompt_id=prompts[index].prompt_id,
            category=prompts[index].category,
            turn=turn,
            messages=(*messages[index], {"role": "assistant", "content": text}),
            prompt_ids=encoded[index],
            answer_ids=tuple(answer_ids),
            ended=ended,
        )
    return outcomes


@torch.inference_mode()
def continue_tokens(
    target: Target,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    *,
    max_new_tokens: int,
    seed: int,
    requests: Sequence[int],
) -> list[list[int]]:
    """Continue a batch of token ids until each row has ended.

    Args:
        target: the model that continues.
        prompts: token ids, at least one a row and fewer than the context.
        sampling: the distribution of the next token.
        max_new_tokens: longest continuation.
        seed, requests: name the rows' random numbers, which depend on nothing else (`heads.sampling.counter_rng`).

    Returns:
        The continuations, end-of-text token included where there is one.

    Raises:
        RuntimeError: the target's logits are not finite.
    """
    if not prompts:
        return []
    rows = [list(prompt) for prompt in prompts]
    limits = [min(len(prompt) + max_new_tokens, target.max_positions) for prompt in prompts]
    active = list(range(len(rows)))
    cache = new_cache(target.model, max(limits))
    streams = Streams(seed, requests, target.device)
    hidden_BD = _read_prompts(target, cache, rows)
    while True:
        tokens = next_tokens(target, hidden_BD, sampling, streams, [len(rows[number]) for number in active])
        for number, token in zip(active, tokens, strict=True):
            rows[number].append(token)
        ended = {n for n in active if rows[n][-1] in target.eos_token_ids or len(rows[n]) >= limits[n]}
        if ended:
            kept = [place for place, number in enumerate(active) if number not in ended]
            active = [active[place] for place in kept]
            if not active:
                break
            cache.keep_rows(kept)
            streams.keep_rows(kept)
        ids_B1 = torch.tensor([rows[number][-1:] for number in active], device=target.device)
        starts = [len(rows[number]) - 1 for number in active]
        hidden_BD = forward_rows(target.model, cache, ids_B1, starts)[:, 0]
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def next_tokens(
    target: Target, hidden_BD: Tensor, sampling: SamplingConfig, streams: Streams, positions: Collection[int]
) -> list[int]:
    """Return each row's next token: the greedy choice, or a draw by the row's own random number for that position.

    Raises:
        RuntimeError: the logits are not finite.
    """
    logits_BV = head_logits(target.model, hidden_BD)
    if not bool(torch.isfinite(logits_BV.amax())):
        raise RuntimeError(f"the target's logits are not finite in {target.model.dtype}; try another target.dtype")
    if sampling.temperature == 0:
        return logits_BV.argmax(-1).tolist()
    positions_B1 = torch.tensor(list(positions), device=target.device).unsqueeze(1)
    return draw(token_probabilities(logits_BV, sampling), streams.uniform(Role.TARGET, positions_B1).squeeze(1)).tolist()


def up_to_end(ids: Sequence[int], end_ids: Collection[int]) -> list[int]:
    """Return token ids up to the first that ends an answer, which is then the last one returned."""
    end = next((place for place, token in enumerate(ids) if token in end_ids), len(ids))
    return list(ids[: end + 1])


def request_number(name: str) -> int:
    """Return the 63-bit number by which a request's random numbers are drawn, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 1


def _read_prompts(target: Target, cache: RowCache, rows: Sequence[Sequence[int]]) -> Tensor:
    """Fill the cache with the prompts and return the hidden state `[B, D]` of each one's last token."""
    lengths = [len(row) for row in rows]
    padded = [[*row, *[0] * (max(lengths) - len(row))] for row in rows]
    hidden_BTD = forward_rows(target.model, cache, torch.tensor(padded, device=target.device), [0] * len(rows))
    last_B = torch.tensor(lengths, device=target.device) - 1
    return hidden_BTD[torch.arange(len(rows), device=target.device), last_B]
