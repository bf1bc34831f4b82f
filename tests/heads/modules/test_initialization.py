"""Noise on taps: uniform, as wide as asked for in units of each position's own scale, and none on the final state."""

import torch

from heads.modules.initialization import with_noise
from heads.target.hidden_states import TargetStates


def test_noise_is_uniform_in_units_of_each_positions_root_mean_square():
    torch.manual_seed(0)
    scale_BT1 = torch.tensor([[0.1, 1.0, 50.0]]).unsqueeze(-1)
    taps_ABTE = tuple(torch.randn(1, 3, 4096, dtype=torch.bfloat16) * scale_BT1.bfloat16() for _ in range(2))
    states = TargetStates(final_BTE=torch.ones(1, 3, 4), taps_ABTE=taps_ABTE)
    noisy = with_noise(states, 0.5)
    assert noisy.final_BTE is states.final_BTE
    for tap, changed in zip(taps_ABTE, noisy.taps_ABTE, strict=True):
        relative = (changed - tap.float()) / tap.float().square().mean(-1, keepdim=True).sqrt()
        assert relative.abs().max() <= 0.5 + 1e-5
        torch.testing.assert_close(relative.std(-1), torch.full((1, 3), 0.5 / 3**0.5), atol=0.02, rtol=0)
        torch.testing.assert_close(relative.mean(-1), torch.zeros(1, 3), atol=0.03, rtol=0)


def test_without_noise_states_stay_as_they_are_and_nothing_is_drawn():
    states = TargetStates(final_BTE=torch.ones(1, 3, 4), taps_ABTE=(torch.ones(1, 3, 4),))
    before = torch.get_rng_state()
    assert with_noise(states, 0.0) is states
    assert torch.equal(torch.get_rng_state(), before)
