#!/usr/bin/env bash
# One training over several ranks, started by Open MPI's launcher. On CPUs the ranks also talk through MPI; on GPUs
# through NCCL, and MPI only tells them who they are.
#
#   RANKS=2 deploy/mpirun.sh --config quickstart --out-dir artifacts/two            # this machine
#   RANKS=16 HOSTFILE=deploy/hostfile.example deploy/mpirun.sh --out-dir /shared/runs/mine   # several
#
# All words go to `trefoil train`. mpirun gives every process OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK, which the
# trainer reads. When one rank fails mpirun ends all of them: start the same command again, --resume auto goes on.
set -euo pipefail

# The secret with which ranks on GPUs authenticate each other; `-x NAME` passes it on without showing it.
if [[ -z "${TREFOIL_RUN_SECRET_FILE:-}" ]]; then
  export TREFOIL_RUN_SECRET="${TREFOIL_RUN_SECRET:-$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')}"
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
arguments=(-n "${RANKS:?set RANKS to the number of processes}")
if [[ -n "${HOSTFILE:-}" ]]; then
  arguments+=(--hostfile "$HOSTFILE")
  # The other machines start with an empty environment: these travel. (MASTER_ADDR is for NCCL; it is rank 0's machine.)
  for name in CONFIG HF_ENDPOINT HF_TOKEN MASTER_ADDR MASTER_PORT NCCL_SOCKET_IFNAME TREFOIL_CACHE TREFOIL_RUN_SECRET \
    TREFOIL_RUN_SECRET_FILE; do
    [[ -z "${!name:-}" ]] || arguments+=(-x "$name")
  done
  while IFS='=' read -r name _; do
    [[ "$name" != NSA_* ]] || arguments+=(-x "$name")
  done < <(env)
else
  arguments+=(--oversubscribe) # more ranks than cores is slow, not wrong
fi
# Every rank runs threads of its own, so it must not be tied to one core. Open MPI refuses root unless told otherwise;
# in a container root is usual.
arguments+=(--bind-to none)
[[ "$(id -u)" -ne 0 ]] || arguments+=(--allow-run-as-root)

# Ranks on one machine share its cores: give each its part with --set runtime.threads=N.
exec mpirun "${arguments[@]}" node "$root/dist/cli/main.js" train --resume auto "$@"
