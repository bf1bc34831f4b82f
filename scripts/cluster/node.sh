#!/usr/bin/env bash
# One node's part of a training, on behalf of slurm.sbatch, torchrun_elastic.sh and kubernetes_job.yaml, or by hand on each node:
#
#   NUM_NODES=2 MAIN_HOST=node0 scripts/cluster/node.sh train/heads.py --config configs/heads/eagle3.yaml
#
# Asked to stop (SIGTERM), it hands that on once, gives the processes GRACE_SECONDS to write their checkpoint, and ends with 143,
# as training itself does: the launcher in between would end with 1.

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

if [[ -n "$RECIPE" ]]; then
    launcher=("$PYTHON" -m accelerate.commands.launch --config_file "$RECIPE" --num_machines "$NUM_NODES"
        --num_processes "$((NUM_NODES * PROCESSES_PER_NODE))" --machine_rank "$NODE_RANK"
        --main_process_ip "$MAIN_HOST" --main_process_port "$MAIN_PORT")
else
    launcher=("$PYTHON" -m torch.distributed.run --nnodes "$NUM_NODES" --nproc_per_node "$PROCESSES_PER_NODE"
        --rdzv_backend c10d --rdzv_endpoint "$MAIN_HOST:$MAIN_PORT" --rdzv_id "$RUN_ID" --max_restarts "$MAX_RESTARTS")
fi

# A session of its own: whoever signals this script's whole group signals the launcher through this script alone, once.
stopped=""
setsid "${launcher[@]}" "$@" &
child=$!
trap 'stopped=yes; kill -TERM "$child" 2>/dev/null || true' TERM

code=0
wait "$child" || code=$?
if [[ -n "$stopped" ]]; then
    wait "$child" || true # the first wait ended with the signal, not with the launcher
    exit 143
fi
exit "$code"
