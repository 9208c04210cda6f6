#!/usr/bin/env bash
# Makes .venvs/trl, where the peer of the end-to-end comparison lives (its dependencies may differ from ours).
# The same torch and transformers as in .venv, so that the two differ in the trainer alone. A second start does nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

trl="trl==1.16.0"
venv=.venvs/trl
stamp=$venv/spmd_rl.stamp

version_of() { .venv/bin/python -c "import importlib.metadata as m; print('$1==' + m.version('$1').partition('+')[0])"; }
[ -x .venv/bin/python ] || { echo "trl_env: run launch/setup.sh first" >&2; exit 1; }
same=()
for package in torch transformers numpy reasoning-gym math-verify; do same+=("$(version_of "$package")"); done
wanted="$trl ${same[*]}"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    echo "trl_env: $venv is up to date"
    exit 0
fi

echo "trl_env: making $venv ($wanted)"
rm -rf "$venv" # also what an aborted run left
mkdir -p .venvs
.venv/bin/python -m venv "$venv"
pip() {
    "$venv/bin/python" -m pip install --no-input --disable-pip-version-check --progress-bar off "$@" \
        >>"$venv/setup.log" 2>&1 ||
        { tail -n 15 "$venv/setup.log" >&2; echo "trl_env: pip failed (its last lines are above)" >&2; exit 1; }
}
pip "${same[0]}" # first: else another package pulls in another build of torch
pip "${same[@]}" "$trl" psutil
echo "$wanted" >"$stamp"
echo "trl_env: $venv is ready"
