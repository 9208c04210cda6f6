#!/usr/bin/env bash
# Starts four ranks on two "machines": network namespaces joined by a cable, with addresses of their own. Needs root
# and ip. Nothing here ends the other ranks when one fails; the exit status is the first failing rank's.
#
#   two_machines.sh COMMAND [ARGUMENT ...]
#
# As on many real machines, the host name leads to a loopback address, and the first machine knows the meeting point
# by such an address, too.
set -euo pipefail

a=spmd-a-$$ b=spmd-b-$$
# shellcheck disable=SC2317,SC2329  # the trap calls it
cleanup() { ip netns del "$a" 2>/dev/null || true; ip netns del "$b" 2>/dev/null || true; }
trap cleanup EXIT
ip netns add "$a"
ip netns add "$b"
ip link add "va$$" netns "$a" type veth peer name "vb$$" netns "$b"
for side in "$a va$$ 10.77.0.1" "$b vb$$ 10.77.0.2"; do
    read -r space device address <<<"$side"
    ip -n "$space" address add "$address/24" dev "$device"
    ip -n "$space" link set "$device" up
    ip -n "$space" link set lo up
done

pids=()
for rank in 0 1 2 3; do
    if [ "$rank" -lt 2 ]; then node=0 space=$a master=127.0.0.1; else node=1 space=$b master=10.77.0.1; fi
    SPMD_RL_RANK=$rank SPMD_RL_SIZE=4 SPMD_RL_LOCAL_RANK=$((rank % 2)) SPMD_RL_LOCAL_SIZE=2 SPMD_RL_NODE=$node \
        SPMD_RL_NODES=2 SPMD_RL_MASTER=$master:29400 ip netns exec "$space" "$@" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
exit "$status"
