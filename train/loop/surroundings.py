"""What reaches a training from outside of its recipe: accelerate's variables, and its `default_config.yaml` by way of them.

`accelerate launch` puts what that file says into the environment, where `Accelerator` takes it up unasked. How processes hold
weights is the launcher's to say, and what is trained the recipe's: such variables are overridden by a line in the log. What no
engine does is refused. docs/training.md has the table.
"""

from __future__ import annotations

import logging
import os

from accelerate.utils import parse_flag_from_env

from configs.runtime.errors import ConfigError
from configs.schema.training import DistillConfig, HeadsConfig
from train.loop.lineage import fsdp_is_requested

log = logging.getLogger("draftsmith")

OVERRIDDEN = {  # by keys of the recipe
    "MIXED_PRECISION": ("schedule", "mixed_precision"),
    "GRADIENT_ACCUMULATION_STEPS": ("schedule", "gradient_accumulation_steps"),
    "GRADIENT_CLIPPING": ("optimizer", "max_grad_norm"),
    "DYNAMO_BACKEND": ("loss", "compiled"),  # nothing else is compiled
}
LEFT_OPEN = {"no", "none", "auto", "1"}  # what the launcher hands on where nobody chose
REFUSED = {"USE_MEGATRON_LM": "megatron_lm_config", "USE_PARALLELISM_CONFIG": "parallelism_config"}
REFUSED_OF_FSDP = ("offload_params", "activation_checkpointing")


def check_surroundings(config: DistillConfig | HeadsConfig) -> None:
    """Say in the log which of accelerate's settings the recipe overrides; a ConfigError for those that no engine does."""
    for name, section in REFUSED.items():
        if parse_flag_from_env(f"ACCELERATE_{name}"):
            raise ConfigError(f"{section} of accelerate's config (ACCELERATE_{name}): not supported; take it out")
    if fsdp_is_requested():
        _check_fsdp()
    for name, (section, key) in OVERRIDDEN.items():
        asked, own = os.environ.get(f"ACCELERATE_{name}", "no"), getattr(getattr(config, section), key)
        if asked.lower() not in LEFT_OPEN | {str(own).lower()}:
            log.warning("ACCELERATE_%s=%s is overridden: %s.%s of the recipe decides, %s", name, asked, section, key, own)
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" not in os.environ:
        log.warning(
            "MASTER_ADDR is set and WORLD_SIZE is not: this is the only process. On a CPU accelerate's launcher starts one "
            "whatever num_processes says; torchrun --nproc_per_node, or configs/accelerate/ddp_cpu.yaml, starts several"
        )


def _check_fsdp() -> None:
    if (version := os.environ.get("FSDP_VERSION", "1")) != "2":
        raise ConfigError(f"fsdp_config.fsdp_version of accelerate's config: 2 is supported, got {version}")
    for name in REFUSED_OF_FSDP:
        if parse_flag_from_env(f"FSDP_{name.upper()}"):
            raise ConfigError(
                f"fsdp_config.fsdp_{name} of accelerate's config: must be false, got true; to save more memory than FSDP "
                "does, launch with configs/accelerate/zero3_offload.yaml"
            )
