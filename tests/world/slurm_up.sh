#!/usr/bin/env bash
# A real Slurm on this one machine, for tests: a controller and two nodes of four processors each. Needs root.
#
#   slurm_up.sh FOLDER         starts it, installing slurm-wlm by apt-get if missing; then: SLURM_CONF=FOLDER/slurm.conf
#   slurm_up.sh FOLDER down    ends it
#
# Exit status 3: it cannot run here (no root, or no Slurm and no apt-get), with the reason on stderr.
set -euo pipefail

folder=$1
export SLURM_CONF=$folder/slurm.conf

if [ "${2:-up}" = down ]; then
    for pidfile in "$folder"/*.pid; do
        if [ -s "$pidfile" ]; then kill -TERM "$(cat "$pidfile")" 2>/dev/null || true; fi
    done
    exit 0
fi

[ "$(id -u)" = 0 ] || { echo "slurm_up: needs root" >&2; exit 3; }
if ! command -v slurmctld >/dev/null || ! command -v slurmd >/dev/null || ! command -v srun >/dev/null; then
    command -v apt-get >/dev/null || { echo "slurm_up: Slurm is not installed, and there is no apt-get" >&2; exit 3; }
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update && apt-get install -y --no-install-recommends slurm-wlm; } >"$folder/apt.log" 2>&1 ||
        { echo "slurm_up: apt-get install slurm-wlm failed: $(tail -n 1 "$folder/apt.log")" >&2; exit 3; }
fi

host=$(hostname)
port=$((20000 + RANDOM % 9000))
mkdir -p "$folder/state" "$folder/spool"
# The names n1 and n2 lead nowhere, unlike a cluster's: a job here has to set MASTER_ADDR.
cat >"$SLURM_CONF" <<CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
AuthType=auth/none
CredType=cred/none
MpiDefault=none
SlurmUser=root
SlurmdUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
KillWait=5
SlurmctldTimeout=30
SlurmdTimeout=30
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 1)) CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + 2)) CPUs=4 State=UNKNOWN
PartitionName=test Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
CONF

slurmctld
slurmd -N n1
slurmd -N n2
for _ in $(seq 100); do
    if [ "$(sinfo --noheader --states=idle --format=%D 2>/dev/null)" = 2 ]; then exit 0; fi
    sleep 0.2
done
echo "slurm_up: the nodes did not become idle:" >&2
tail -n 5 "$folder"/*.log >&2
exit 1
