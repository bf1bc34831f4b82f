#!/usr/bin/env bash
# One node's part of a training, on behalf of slurm.sbatch and kubernetes_job.yaml, or by hand on each node:
#
#   NUM_NODES=2 MAIN_HOST=node0 scripts/cluster/node.sh train/heads.py --config configs/heads/eagle3.yaml
#
# With NUM_NODES=MIN:MAX and MAX_RESTARTS, training survives the death of a process or a node: torchrun ends the others, waits for
# MIN nodes at least, and starts all again from the last checkpoint. ACCELERATE_USE_FSDP=true FSDP_VERSION=2 in front of it takes
# FSDP2.
#
# Asked to stop (SIGTERM, Ctrl-C, a terminal that is closed), it hands that on once, as SIGTERM, and gives the processes
# GRACE_SECONDS to write their checkpoint. It ends with 143 where training did so with its checkpoint written, which training says
# in a file (the launcher in between ends with 1 whatever happened), and with the launcher's code otherwise: a checkpoint that did
# not fit on the disk is a failure.

# --- placeholders -----------------------------------------------------------------------------------------------------
NUM_NODES="${NUM_NODES:-1}"                          # or MIN:MAX, where nodes may come and go
NODE_RANK="${NODE_RANK:-0}"                          # of this node; only with an accelerate recipe
MAIN_HOST="${MAIN_HOST:-localhost}"                  # where the nodes meet: the first of them
MAIN_PORT="${MAIN_PORT:-29500}"
RUN_ID="${RUN_ID:-draftsmith}"                       # the same on all nodes of a run, another for another run
PROCESSES_PER_NODE="${PROCESSES_PER_NODE:-1}"        # one a GPU
MAX_RESTARTS="${MAX_RESTARTS:-0}"                    # of all processes, after one has died
RECIPE="${RECIPE:-}"                                 # a file of configs/accelerate (DeepSpeed, FSDP2); empty: DDP by torchrun
GRACE_SECONDS="${GRACE_SECONDS:-110}"
PYTHON="${PYTHON:-.venv/bin/python}"
# ----------------------------------------------------------------------------------------------------------------------

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="$GRACE_SECONDS"
# torchrun 2.13 hands the store it keeps to the processes it starts again, in which gloo finds the addresses of the dead ones.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

if [[ -n "$RECIPE" && "$NUM_NODES" == *:* ]]; then
    echo "error: RECIPE=$RECIPE needs a fixed number of nodes, NUM_NODES=$NUM_NODES was given: unset RECIPE for elastic DDP," \
        "and set ACCELERATE_USE_FSDP=true FSDP_VERSION=2 for elastic FSDP2" >&2
    exit 2
fi
DRAFTSMITH_EXIT_CODE_FILE="$(mktemp)"
export DRAFTSMITH_EXIT_CODE_FILE
trap 'rm -f "$DRAFTSMITH_EXIT_CODE_FILE"' EXIT

if [[ -n "$RECIPE" ]]; then
    launcher=("$PYTHON" -m accelerate.commands.launch --config_file "$RECIPE" --num_machines "$NUM_NODES"
        --num_processes "$((NUM_NODES * PROCESSES_PER_NODE))" --machine_rank "$NODE_RANK"
        --main_process_ip "$MAIN_HOST" --main_process_port "$MAIN_PORT")
else
    launcher=("$PYTHON" -m torch.distributed.run --nnodes "$NUM_NODES" --nproc_per_node "$PROCESSES_PER_NODE"
        --rdzv_backend c10d --rdzv_endpoint "$MAIN_HOST:$MAIN_PORT" --rdzv_id "$RUN_ID" --max_restarts "$MAX_RESTARTS")
fi

# A session of its own: whoever signals this script's whole group signals the launcher through this script alone, once.
signals=0
setsid "${launcher[@]}" "$@" &
child=$!
trap '((signals += 1)); [[ $signals -gt 1 ]] || kill -TERM "$child" 2>/dev/null || true' TERM INT HUP

while true; do
    before=$signals code=0
    wait "$child" || code=$?
    [[ $signals -eq $before ]] && break # else the wait may have ended with a signal, not with the launcher
done
if [[ $signals -gt 0 && $code -ne 0 ]]; then
    [[ "$(< "$DRAFTSMITH_EXIT_CODE_FILE")" == 143 ]] && exit 143
    echo "asked to stop, and no checkpoint was written for it: the launcher ended with $code" >&2
    [[ $code -eq 143 ]] && exit 1
fi
exit "$code"
