"""A suite's prompts as requests, one turn at a time. Later turns follow the plain answers in every mode.

If each mode went on from its own answers, one difference in the first turn would make the second turns different prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from distill.dataset.conversations import Message
from distill.generation.prompts import Prompt, encode_prompt
from eval.decoder.records import FAILED, Generation, StopReason
from eval.decoder.request import Request
from heads.frozen.loading import Target


class Turns:
    """The conversations of some suites' prompts, which have different ids.

    Args:
        target: the target.
        prompts: of all suites, those of one suite after those of another.
        suite_of: the name of each prompt's suite, by its id.

    Raises:
        InputError: a first turn leaves no room for an answer in the target's context.
    """

    def __init__(self, target: Target, prompts: Sequence[Prompt], suite_of: Mapping[str, str] | None = None) -> None:
        self.target = target
        self._suite_of = suite_of or {}
        self._prompts = {prompt.prompt_id: prompt for prompt in prompts}
        self._messages: dict[str, list[Message]] = {prompt.prompt_id: prompt.messages for prompt in prompts}
        self.first = [self._request(prompt, encode_prompt(target, prompt), 0) for prompt in prompts]

    def follow(self, answers: Iterable[Generation]) -> tuple[list[Request], list[Generation]]:
        """Take the plain answers to a turn of different prompts; return the next turn's requests, and the turns that are lost.

        An empty generation stands for each turn that is lost: all those left after a failed answer, or after one that leaves no
        room in the context.
        """
        requests: list[Request] = []
        lost: list[Generation] = []
        for answer in answers:
            prompt, turn = self._prompts[answer.prompt_id], answer.turn + 1
            if turn >= len(prompt.turns):
                del self._messages[answer.prompt_id]
                continue
            if answer.stop_reason in FAILED:
                lost += self._lose(answer, prompt, turn, "after_a_failed_turn")
                continue
            tokens = self._extend(answer, prompt, turn)
            if len(tokens) < self.target.max_positions:
                requests.append(self._request(prompt, tokens, turn))
            else:
                lost += self._lose(answer, prompt, turn, "no_room_in_context")
        return requests, lost

    def _extend(self, answer: Generation, prompt: Prompt, turn: int) -> tuple[int, ...]:
        """Add an answer and the next question to the conversation; return the token ids of all of it."""
        text = str(self.target.tokenizer.decode(list(answer.tokens), skip_special_tokens=True))
        messages = self._messages[answer.prompt_id]
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": prompt.turns[turn]}]
        return tuple(self.target.encode_chat(messages, tools=prompt.tools, media=prompt.media))

    def _request(self, prompt: Prompt, tokens: tuple[int, ...], turn: int) -> Request:
        return Request(
            prompt_id=prompt.prompt_id,
            category=prompt.category,
            tokens=tokens,
            turn=turn,
            suite=self._suite_of.get(prompt.prompt_id, ""),
            media_prompt=self.target.media_prompt(self._messages[prompt.prompt_id], prompt.media, tools=prompt.tools),
        )

    def _lose(self, answer: Generation, prompt: Prompt, turn: int, reason: StopReason) -> list[Generation]:
        """Return records of a turn that is lost for `reason`, and of the turns after it."""
        lost = []
        for number in range(turn, len(prompt.turns)):
            own_reason: StopReason = reason if number == turn else "after_a_failed_turn"
            lost.append(undecoded(self._request(prompt, (), number), answer.mode, own_reason))
        return lost


def undecoded(request: Request, mode: str, stop_reason: StopReason) -> Generation:
    """Return the record of a request that was not decoded."""
    return Generation(
        prompt_id=request.prompt_id,
        category=request.category,
        mode=mode,
        prompt_tokens=request.tokens,
        tokens=(),
        rounds=(),
        stop_reason=stop_reason,
        turn=request.turn,
        suite=request.suite,
    )
