#!/usr/bin/env bash
# The whole way in one command: set up, prepare a small real model, and train it by reinforcement learning.
#
#   launch/quickstart.sh [section.key=value ...]     e.g. launch/quickstart.sh train.steps=4
#
# Uses all NVIDIA GPUs of this machine, else two processes on its CPU. A second start installs nothing and resumes from
# the last checkpoint; where the run has finished it says so, and how to start another one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE # or every process compiles torch anew, which takes seconds

launch/setup.sh
.venv/bin/python launch/prepare_model.py
export HF_HUB_OFFLINE=1
exec launch/torchrun.sh configs/quickstart.yaml "$@"
