"""A counter-based random number generator: each number is a pure function of (seed, request, round, position, role).

As with Philox and Threefry (Salmon et al., SC 2011) there is no state to advance, so a request gets the same numbers in any
batch and order of work, and drafting, acceptance and residual never share one, which would bias the output. The round is a
coordinate of drafting and accepting: block verification looks at every draft of a round before it keeps some, so given what it
kept the numbers of the rejected ones are no longer uniform, and the next round must not use them again at the same positions.
The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), applied once for each coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from heads.device import on_device, widest_float


def _signed(x: int) -> int:
    """Return the signed 64-bit integer with the same low 64 bits: torch has no unsigned arithmetic."""
    return (x + (1 << 63)) % (1 << 64) - (1 << 63)


_GAMMA = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


class Role(IntEnum):
    """What a random number is for."""

    TARGET = 1  # a token from the target's own distribution: plain decoding, bonus, sample-and-match
    DRAFT = 2  # a token from the draft's distribution
    ACCEPT = 3  # the test whether a drafted token stays
    RESIDUAL = 4  # the token after a rejection


ROLES_OF_A_ROUND = {Role.DRAFT, Role.ACCEPT}


class CounterRNG:
    """The random numbers of one decoding run; `requests` are the request's number for each batch row."""

    def __init__(self, seed: int, requests: Sequence[int], device: torch.device) -> None:
        self.seed = seed
        self.requests_B = torch.tensor(requests, dtype=torch.int64, device=device)

    def uniform(self, role: Role, positions_BT: Tensor, round_B1: Tensor | None = None) -> Tensor:
        """Return numbers in [0, 1), in float64 where the device has it, by position of the token being decided, int64.

        `round_B1` is the round, as the position of its first draft, int64; required for drafting and accepting.
        """
        state_B1 = _mix(_mix(self.requests_B + _signed(self.seed * _GAMMA)) + _signed(role * _GAMMA)).unsqueeze(1)
        if round_B1 is not None:
            state_B1 = _mix(state_B1 + (round_B1 + 1) * _GAMMA)
        elif role in ROLES_OF_A_ROUND:
            raise ValueError(f"numbers for {role.name} belong to a round; say which")
        bits_BT = _mix(state_B1 + (positions_BT + 1) * _GAMMA)
        return _shift_right(bits_BT, 11).to(widest_float(bits_BT.device)) * 2.0**-53

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Drop all rows but these, in this order."""
        self.requests_B = self.requests_B[on_device(rows, self.requests_B.device)]


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros; torch's own shift of a negative number shifts in ones."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
