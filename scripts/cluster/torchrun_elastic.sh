#!/usr/bin/env bash
# On each node: MAIN_HOST=node0 scripts/cluster/torchrun_elastic.sh train/heads.py --config configs/heads/eagle3.yaml
#
# DDP that survives the death of a process or a node: where one dies, torchrun ends the others, waits until between MIN_NODES and
# MAX_NODES nodes are there, starts all processes again, and training goes on from its last checkpoint. With MAX_NODES above
# MIN_NODES, give schedule.micro_batches_per_step, a multiple of each number of processes that there may be: a step is then the
# same whatever their number. Without it a step belongs to a number of processes, and a lost node has to be waited for. What is
# lost is what was done since the last checkpoint, so write them: schedule.checkpoint_every_steps. ACCELERATE_USE_FSDP=true
# FSDP_VERSION=2 in front of it takes FSDP2. The others notice the loss of a node after 15 s, and wait 30 s for another one.
# MAIN_HOST is where they find each other: if that node is lost, all end, and the same command starts again from the checkpoint.

# --- placeholders -----------------------------------------------------------------------------------------------------
MIN_NODES="${MIN_NODES:-1}"
MAX_NODES="${MAX_NODES:-$MIN_NODES}"
export MAIN_HOST="${MAIN_HOST:-localhost}"           # the node where all meet, the same on each
export MAIN_PORT="${MAIN_PORT:-29500}"
export RUN_ID="${RUN_ID:-draftsmith}"                # the same on each node, another for another run
export PROCESSES_PER_NODE="${PROCESSES_PER_NODE:-1}" # one a GPU
export MAX_RESTARTS="${MAX_RESTARTS:-20}"
# ----------------------------------------------------------------------------------------------------------------------

set -euo pipefail
export NUM_NODES="$MIN_NODES:$MAX_NODES"
exec "$(dirname "${BASH_SOURCE[0]}")/node.sh" "$@"
