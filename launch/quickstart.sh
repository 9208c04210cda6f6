#!/usr/bin/env bash
# The whole way in one command: set up, prepare a small real model, and train it by reinforcement learning.
#
#   launch/quickstart.sh [section.key=value ...]     e.g. launch/quickstart.sh train.steps=4
#
# Uses all NVIDIA GPUs of this machine, else two processes on its CPU. A second start installs nothing and resumes from
# the last checkpoint; where the run has finished it says so, and how to start another one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

launch/setup.sh
.venv/bin/python launch/prepare_model.py

ranks=2
if command -v nvidia-smi >/dev/null 2>&1; then
    gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    if [ "$gpus" -gt 0 ]; then ranks=$gpus; fi
fi
export HF_HUB_OFFLINE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # what torchrun would set, with a warning; run.threads has the last word
exec .venv/bin/torchrun --standalone --nproc-per-node="$ranks" spmd_rl/main.py configs/quickstart.yaml "$@"
