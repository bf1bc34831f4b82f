"""`benchmark.py launches`: every count of what a GPU would do, made on a CPU, into one results file."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from configs.runtime.command import DONE
from heads.families.registry import FAMILIES
from scripts.lab.bench.harness import write_results
from scripts.lab.counts.launches import count_launches, count_walks, tiny_target
from scripts.lab.counts.roofline import estimate_step
from scripts.lab.counts.traffic import (
    count_copied_weights,
    count_expanded_bytes,
    count_loss_bytes,
    count_prefill_masks,
    count_sum_bytes,
    count_waits,
)
from scripts.lab.settings import LaunchesConfig


def record_launches(config: LaunchesConfig) -> int:
    with TemporaryDirectory(prefix="launches-") as scratch:
        target = tiny_target(Path(scratch))
    found = {name: launches for kind in FAMILIES for name, launches in count_launches(kind, target).items()}
    walks, loss = count_walks(target), count_loss_bytes()
    step = estimate_step(loss["loss_bytes_a_logit_compiled"], count_sum_bytes(target))
    ratios: dict[str, float] = {
        "eagle3_five_drafts_greedy": found["eagle3 greedy draft"].total,
        "eagle3_five_drafts_sampled": found["eagle3 sampled draft"].total,
        "verified_chain_besides_target": found["eagle3 greedy rest"].total,
        "verified_sampled_chain_besides_target": found["eagle3 sampled rest"].total,
        "module_walks_per_round": walks["walks"],
        "hooks_set_per_round": walks["hooks"],
        "weights_copied_per_replay": count_copied_weights(target),
        "expanded_bytes_per_verification": count_expanded_bytes(target),
        "prefill_mask_bytes": max(count_prefill_masks(kind, target) for kind in FAMILIES),
        "waits_per_round": count_waits(target),
        **loss,
        **{f"estimated_{name}": value for name, value in step.items()},
    }
    rows = [{"of": name, "launches": launches.total} for name, launches in found.items()]
    by_place = {name: dict(sorted(launches.by_place.items())) for name, launches in found.items()}
    write_results(config.output, "launches", config, rows=rows, ratios=ratios, by_place=by_place)
    return DONE
