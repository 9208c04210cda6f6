#!/usr/bin/env bash
# Starts a run by torchrun, on this machine or, run once on each of them, on several.
#
#   launch/torchrun.sh CONFIG [section.key=value ...]
#
#   NPROC        ranks on this machine (default: its NVIDIA GPUs, or 2 without any)
#   NNODES       machines (default 1)
#   NODE_RANK    which of them this is, from 0                                     (several machines only)
#   MASTER_ADDR  machine 0's name or address, as the others reach it               (several machines only)
#   MASTER_PORT  a free port there (default 29500)                                 (several machines only)
#   GRACE_S      seconds that a run gets to save its state after Ctrl-C or SIGTERM (default 300)
#
# e.g. on two machines: NNODES=2 NODE_RANK=0 MASTER_ADDR=node-a launch/torchrun.sh configs/quickstart.yaml
#                       NNODES=2 NODE_RANK=1 MASTER_ADDR=node-a launch/torchrun.sh configs/quickstart.yaml
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi
if [ "$gpus" -gt 0 ]; then ranks=$gpus; else ranks=2; fi

options=(--nproc-per-node="${NPROC:-$ranks}")
if [ "${NNODES:-1}" -gt 1 ]; then
    : "${NODE_RANK:?which of the $NNODES machines is this (0 to $((NNODES - 1)))?}"
    : "${MASTER_ADDR:?the name or address of machine 0}"
    options+=(--nnodes="$NNODES" --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR"
        --master-port="${MASTER_PORT:-29500}")
else
    options+=(--standalone --local-addr=127.0.0.1) # needs no host name that leads somewhere
fi
# Without it torchrun kills the ranks 30 s after it passed a signal on; not every version has it.
torch=$("$python" -c 'import importlib.util as i; print(i.find_spec("torch").submodule_search_locations[0])')
if grep -q -e --shutdown-timeout "$torch/distributed/run.py"; then
    options+=(--shutdown-timeout="${GRACE_S:-300}")
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # torchrun would set the same, with a warning; run.threads decides later
exec "$python" "$root/launch/torchrun.py" "${options[@]}" "$root/spmd_rl/main.py" "$@"
