"""The soak tells a run that ended otherwise than an undisturbed one."""

from configs.runtime.command import GATE_FAILED
from scripts.lab.fault_injection import rounds as soak_rounds
from scripts.lab.fault_injection.rounds import FAULTS, soak
from scripts.lab.settings import SoakConfig


def test_a_run_that_ends_otherwise_is_told_and_kept(project, tmp_path, monkeypatch):
    (tmp_path / "project").symlink_to(project.folder)
    monkeypatch.setattr(soak_rounds, "FAULTS", FAULTS[-1:])
    monkeypatch.setattr(soak_rounds, "WORKS", {"cache": soak_rounds.WORKS["cache"]})
    plain = soak_rounds._reference
    monkeypatch.setattr(
        soak_rounds, "_reference", lambda *args: soak_rounds._Reference(content={}, seconds=plain(*args).seconds)
    )
    config = SoakConfig(rounds=1, max_kills=1, folder=str(tmp_path), output=str(tmp_path / "soak.json"))
    assert soak(config) == GATE_FAILED
    assert (tmp_path / "round-00000" / "output" / "manifest.json").exists()
