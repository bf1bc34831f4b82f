"""Write the target's outputs for training data to disk: `python scripts/cache.py --config configs/cache/heads.yaml`.

Under `accelerate launch` several processes share the work. An interrupted run resumes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # run as a script: the checkout's root takes the place of this folder, which Python put first
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from configs.runtime.errors import guard_imports

    guard_imports()

from configs.runtime.command import run_command
from configs.schema.data import CacheConfig


def main(config: CacheConfig) -> None:
    """Make the cache that `config` describes."""
    # torch and transformers take seconds to import: a mistyped key is reported before that.
    from distill.cache.writer import make_cache

    make_cache(config)


if __name__ == "__main__":
    sys.exit(run_command(CacheConfig, main, description="Write the target's outputs for training conversations to disk."))
