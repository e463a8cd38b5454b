#!/usr/bin/env bash
# A run on several ranks, started by Open MPI. Ranks on CPUs also communicate over MPI; ranks on GPUs use NCCL, and MPI only
# assigns their numbers.
#
#   RANKS=2 deploy/mpirun.sh --config quickstart --out-dir artifacts/two            # this machine
#   RANKS=16 HOSTFILE=deploy/hostfile.example deploy/mpirun.sh --out-dir /shared/runs/mine   # several
#
# All arguments are passed to `trefoil train`. mpirun gives every process OMPI_COMM_WORLD_RANK, _SIZE and _LOCAL_RANK, which the
# trainer reads. When a rank fails mpirun ends all of them: start the same command again, --resume auto continues.
set -euo pipefail

# The secret with which ranks on GPUs authenticate each other; `-x NAME` passes it on without showing it.
if [[ -z "${TREFOIL_RUN_SECRET_FILE:-}" ]]; then
  export TREFOIL_RUN_SECRET="${TREFOIL_RUN_SECRET:-$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n')}"
fi

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
arguments=(-n "${RANKS:?set RANKS to the number of processes}")
if [[ -n "${HOSTFILE:-}" ]]; then
  arguments+=(--hostfile "$HOSTFILE")
  # Processes on other machines get only these variables. (MASTER_ADDR, the machine of rank 0, is for NCCL.)
  for name in CONFIG HF_ENDPOINT HF_TOKEN MASTER_ADDR MASTER_PORT NCCL_SOCKET_IFNAME TREFOIL_CACHE TREFOIL_RUN_SECRET \
    TREFOIL_RUN_SECRET_FILE; do
    [[ -z "${!name:-}" ]] || arguments+=(-x "$name")
  done
  while IFS='=' read -r name _; do
    [[ "$name" != NSA_* ]] || arguments+=(-x "$name")
  done < <(env)
else
  arguments+=(--oversubscribe) # more ranks than cores is slow but correct
fi
# Every rank has several threads, so it must not be bound to one core. Open MPI refuses root without a flag; containers
# usually run as root.
arguments+=(--bind-to none)
[[ "$(id -u)" -ne 0 ]] || arguments+=(--allow-run-as-root)

# Ranks of one machine share its cores: --set runtime.threads=N sets the number of each.
exec mpirun "${arguments[@]}" node "$root/dist/cli/main.js" train --resume auto "$@"
