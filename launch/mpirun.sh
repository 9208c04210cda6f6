#!/usr/bin/env bash
# Starts a run by mpirun, Open MPI's or MPICH's. Needs the extra [mpi] (launch/setup.sh mpi), or mpi4py built for the
# MPI of this cluster.
#
#   launch/mpirun.sh CONFIG [section.key=value ...]
#
#   NP        ranks in all (default: the NVIDIA GPUs of this machine, or 2 without any)
#   HOSTFILE  machines and their slots, in the MPI's own format (default: this machine; inside Slurm or PBS: the job's)
#   MPIRUN    the launcher (default: mpirun of .venv, else of PATH)
#
# Ctrl-C or SIGTERM lets the ranks finish the step, save their state and end; a second one ends them at once.
#
# Variables whose names begin with NCCL_, GLOO_, HF_, CUDA_, OMP_, MASTER_, VLLM_ or PYTHON reach all machines. The
# repository and its .venv must lie at the same place on all of them.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '2,/^set/{s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
mpirun=${MPIRUN:-$root/.venv/bin/mpirun}
[ -n "${MPIRUN:-}" ] || [ -x "$mpirun" ] || mpirun=mpirun
command -v "$mpirun" >/dev/null || { echo "mpirun.sh: no mpirun here: launch/setup.sh mpi, or set MPIRUN" >&2; exit 2; }

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true); fi
if [ "$gpus" -gt 0 ]; then ranks=$gpus; else ranks=2; fi

options=()
names=()
while read -r name; do names+=("$name"); done < <(compgen -e | grep -E '^(NCCL_|GLOO_|HF_|CUDA_|OMP_|MASTER_|VLLM_|PYTHON)' || true)
if "$mpirun" --version 2>/dev/null | grep -q 'Open MPI'; then
    # Binding to one core, Open MPI's default for few ranks, would leave a rank's other threads without a core.
    options+=(--bind-to none)
    [ "$(id -u)" != 0 ] || options+=(--allow-run-as-root)
    if [ -n "${HOSTFILE:-}" ]; then options+=(--hostfile "$HOSTFILE"); else options+=(--oversubscribe); fi
    for name in "${names[@]}"; do options+=(-x "$name"); done
else
    if [ -n "${HOSTFILE:-}" ]; then options+=(-f "$HOSTFILE"); fi
    if [ ${#names[@]} -gt 0 ]; then options+=(-genvlist "$(IFS=,; echo "${names[*]}")"); fi
fi

# Asked to stop, an MPI launcher kills its ranks at once; SIGUSR1 it passes on to them. So it gets a process group of its
# own, where a terminal's Ctrl-C doesn't reach it, and ends with this script (prctl 1: PR_SET_PDEATHSIG, 15: SIGTERM).
follow='import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execvp(sys.argv[1], sys.argv[1:])'
set -m
"$python" -c "$follow" "$mpirun" "${options[@]}" -n "${NP:-$ranks}" "$python" "$root/spmd_rl/main.py" "$@" </dev/null &
launcher=$!
signal=USR1
trap 'kill -$signal $launcher 2>/dev/null; signal=TERM' INT TERM HUP
while kill -0 "$launcher" 2>/dev/null; do wait "$launcher" || true; done # a signal ends the wait, too
wait "$launcher"
