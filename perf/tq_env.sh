#!/usr/bin/env bash
# Makes .venvs/tq, where the peer of the exchange comparison lives. A second start does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

peer="TransferQueue==0.1.11"
venv=.venvs/tq
stamp=$venv/spmd_rl.stamp

[ -x .venv/bin/python ] || { echo "tq_env: run launch/setup.sh first" >&2; exit 1; }
torch="torch==$(.venv/bin/python -c "import importlib.metadata as m; print(m.version('torch').partition('+')[0])")"
wanted="$peer $torch"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "tq_env: $venv is up to date"
    exit 0
fi

echo "tq_env: making $venv ($wanted)"
rm -rf "$venv" # also what an aborted run left
mkdir -p .venvs
.venv/bin/python -m venv "$venv"
pip() {
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@" \
        >>"$venv/setup.log" 2>&1 ||
        { tail -n 15 "$venv/setup.log" >&2; echo "tq_env: pip failed (its last lines are above)" >&2; exit 1; }
}
pip "$torch" # first: else another package pulls in another build of torch
pip "$torch" "$peer"
echo "$wanted" >"$stamp"
echo "tq_env: $venv is ready"
