"""The counts a report is built from, taken in a few prompts at a time: sums, and no rounds but those of a few samples.

Each process keeps one and the main process merges them, so that any number of processes gives the numbers of one. Memory
grows with the prompts' own tokens and timings, not with the rounds, which lie on disk (`eval.measure.record_files`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from eval.decoder.records import AUTOREGRESSIVE, FAILED, SPECULATIVE, Generation, Timing
from eval.metrics.acceptance import Acceptance

SAMPLES_A_SIDE = 3  # answers kept whole from either end of the ranking by tokens per target step


class Tally:
    """The generations and timings of a run, counted; a round may draft at most `num_positions` tokens, in some modes others."""

    def __init__(self, num_positions: int, by_mode: Mapping[str, int] | None = None) -> None:
        self.num_positions, self.by_mode = num_positions, dict(by_mode or {})
        self.failed: list[Generation] = []
        self.samples: list[Generation] = []  # speculative ones, whole
        self.timings: list[Timing] = []
        self.num_resumed = 0  # prompts that an earlier session of the run had measured
        self._shares: dict[tuple[str, str], Acceptance] = {}  # (mode, category) -> numbers
        self._answers: dict[str, list[Generation]] = {AUTOREGRESSIVE: [], SPECULATIVE: []}  # without their rounds
        self._turns: dict[str, set[tuple[str, int]]] = {SPECULATIVE: set()}  # mode -> (prompt id, turn)

    def add(self, generations: Sequence[Generation], timings: Iterable[Timing] = ()) -> None:
        """Count prompts that were not counted before, all turns and modes of each; of repeated runs the first repeat."""
        shares: dict[tuple[str, str], list[Generation]] = {}
        for generation in generations:
            self._note(generation.mode, {(generation.prompt_id, generation.turn)})
            shares.setdefault((generation.mode, generation.category), []).append(generation)
            if generation.mode in self._answers:
                self._answers[generation.mode].append(replace(generation, rounds=()))
        for key, own in shares.items():
            self._share(key).update(own)
        self.failed += [generation for generation in generations if generation.stop_reason in FAILED]
        self._keep_samples([generation for generation in generations if generation.mode == SPECULATIVE])
        self.timings += timings

    def merge(self, other: Tally) -> None:
        """Add what another process counted of other prompts."""
        for mode, turns in other._turns.items():
            self._note(mode, turns)
        for key, share in other._shares.items():
            self._share(key).merge(share)
        for mode, answers in other._answers.items():
            self._answers[mode] += answers
        self.failed += other.failed
        self.timings += other.timings
        self.num_resumed += other.num_resumed
        self._keep_samples(other.samples)

    def sort(self, prompt_ids: Sequence[str]) -> None:
        """Bring everything into the order of the prompts, whichever process decoded them."""
        place_of = {prompt_id: place for place, prompt_id in enumerate(prompt_ids)}
        self.timings.sort(key=lambda each: place_of[each.prompt_ids[0]])  # stable: turns and repeats stay as they came
        for answers in (self.failed, *self._answers.values()):
            answers.sort(key=lambda each: (place_of[each.prompt_id], each.turn))
        first_of = {key: min(map(place_of.__getitem__, share.prompt_ids)) for key, share in self._shares.items()}
        self._shares = dict(sorted(self._shares.items(), key=lambda item: first_of[item[0]]))

    def num_drafts(self, mode: str) -> int:
        """Return how many tokens a round of a mode may draft."""
        return self.by_mode.get(mode, self.num_positions)

    @property
    def modes(self) -> list[str]:
        """The modes that were decoded in, speculative decoding first."""
        return list(self._turns)

    @property
    def categories(self) -> dict[str, int]:
        """How many prompts of each category were decoded speculatively."""
        return {category: len(share.prompt_ids) for (mode, category), share in self._shares.items() if mode == SPECULATIVE}

    @property
    def turns(self) -> set[tuple[str, int]]:
        """Every (prompt id, turn) that was decoded in any mode."""
        return {turn for turns in self._turns.values() for turn in turns}

    def of(self, mode: str) -> list[Generation]:
        """Return the plain or the speculative answers, without their rounds."""
        return self._answers[mode]

    def acceptance(self, mode: str, category: str | None = None) -> Acceptance:
        """Return what a mode did on the prompts of one category, or on all."""
        whole = Acceptance(self.num_drafts(mode))
        for (own_mode, own_category), share in self._shares.items():
            if own_mode == mode and category in (None, own_category):
                whole.merge(share)
        return whole

    def answered(self, asked: Collection[tuple[str, int]]) -> set[str]:
        """Return the prompts all of whose turns asked for were decoded in every mode without failing."""
        failed = {(each.prompt_id, each.turn) for each in self.failed}
        lacking = {turn[0] for turn in asked if turn in failed or any(turn not in decoded for decoded in self._turns.values())}
        return {prompt_id for prompt_id, _ in asked} - lacking

    def _share(self, key: tuple[str, str]) -> Acceptance:
        if key not in self._shares:  # not `setdefault`: making one takes longer than counting a prompt
            self._shares[key] = Acceptance(self.num_drafts(key[0]))
        return self._shares[key]

    def _note(self, mode: str, turns: set[tuple[str, int]]) -> None:
        known = self._turns.setdefault(mode, set())
        if twice := known & turns:
            raise ValueError(f"prompt {min(twice)[0]} was decoded twice in mode {mode}; hand in the generations of one repeat")
        known |= turns

    def _keep_samples(self, generations: Sequence[Generation]) -> None:
        """Keep the answers at both ends of the ranking; which ones does not depend on the order they come in."""
        ranked = sorted(
            (each for each in (*self.samples, *generations) if each.rounds),
            key=lambda each: (each.num_committed / len(each.rounds), each.prompt_id, each.turn),
        )
        del ranked[SAMPLES_A_SIDE : max(SAMPLES_A_SIDE, len(ranked) - SAMPLES_A_SIDE)]
        self.samples = ranked
