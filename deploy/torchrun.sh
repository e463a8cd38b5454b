#!/usr/bin/env bash
# A run on several GPUs or machines, started by PyTorch's launcher. Run it on every machine:
#
#   deploy/torchrun.sh --config 125m_2xa100_production --out-dir /shared/runs/mine
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host-a deploy/torchrun.sh …      on the first machine
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=host-a deploy/torchrun.sh …      on the second
#
# All arguments are passed to `trefoil train`. torchrun gives every process RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT,
# which the trainer reads. When a rank dies torchrun ends the others and restarts all, up to MAX_RESTARTS times;
# --resume auto continues from the newest checkpoint. All machines must share the folder of the run.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
nnodes="${NNODES:-1}"
node_rank="${NODE_RANK:-0}"
# One process per GPU. Without a GPU the number must be given.
if [[ -z "${NPROC_PER_NODE:-}" ]]; then
  NPROC_PER_NODE="$(nvidia-smi --list-gpus 2>/dev/null | wc -l)"
  [[ "$NPROC_PER_NODE" -gt 0 ]] || {
    echo "torchrun.sh: no GPU found; set NPROC_PER_NODE to the number of ranks" >&2
    exit 2
  }
fi

arguments=(--nnodes "$nnodes" --node-rank "$node_rank" --nproc-per-node "$NPROC_PER_NODE" --max-restarts "${MAX_RESTARTS:-3}")
# The secret with which ranks authenticate each other. On several machines set it, the same on all, unless they share the
# cache folder (TREFOIL_CACHE, or ~/.cache/trefoil): it then holds one.
if [[ "$nnodes" -eq 1 && -z "${TREFOIL_RUN_SECRET_FILE:-}" ]]; then
  export TREFOIL_RUN_SECRET="${TREFOIL_RUN_SECRET:-$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')}"
fi

# torchrun listens on MASTER_PORT itself; the ranks meet on the first free port after it.
if [[ "$nnodes" -gt 1 ]]; then
  arguments+=(--master-addr "${MASTER_ADDR:?set MASTER_ADDR to the first machine}" --master-port "${MASTER_PORT:-29500}")
else
  arguments+=(--master-addr 127.0.0.1 --master-port "${MASTER_PORT:-29500}")
fi

# --no-python: the program is node, not a Python script.
exec torchrun "${arguments[@]}" --no-python node "$root/dist/cli/main.js" train --resume auto "$@"
