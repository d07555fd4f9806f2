#!/usr/bin/env bash
# What a container runs. `alone` is a whole server. The others share a Ray cluster, with one container a node:
#
#   deploy/container.sh alone            `tandem serve` with a local Ray; further words are its options
#   deploy/container.sh router           the head of the Ray cluster, which takes no worker, and `tandem serve`
#   deploy/container.sh prefill|decode|draft
#                                        a node that takes one worker of this role
#
#   ROUTER_HOST           where the router is (FQ_RAY_IP, as KubeRay has it, or router)
#   RAY_AUTH_TOKEN_PATH   the file with Ray's token, on a volume that all containers share. The router makes it
#                         where it is missing.
#   START_TIMEOUT_S       how long a node waits for the router (120)
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
role=${1:-} router=${ROUTER_HOST:-${FQ_RAY_IP:-router}} port=${RAY_PORT:-6379}
address=$(hostname -I | cut -d ' ' -f 1)
# Nothing of ours is in Ray's object store, but with that transport; Docker gives /dev/shm 64 MiB by default.
export RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=${RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES:-$((80 << 20))}

die() { echo "container.sh: $*" >&2; exit 1; }
listens() { [ -s "$RAY_AUTH_TOKEN_PATH" ] && (exec 3<>"/dev/tcp/$router/$port") 2>/dev/null; }

# Of the router, too, after a restart, when the token may be the old one for a moment: `ray start` then fails.
wait_for_router() {
    local left=${START_TIMEOUT_S:-120}
    until listens; do
        [ $((left -= 1)) -gt 0 ] || die "$router:$port does not answer, or $RAY_AUTH_TOKEN_PATH is missing"
        sleep 1
    done
}

case $role in
alone)
    shift
    exec tandem serve "$@"
    ;;
router)
    CLUSTER_HOSTS=$address "$here/node.sh" head
    exec tandem serve --ray-address auto
    ;;
prefill | decode | draft)
    wait_for_router
    head=$(getent ahostsv4 "$router" | head -n 1 | cut -d ' ' -f 1)
    CLUSTER_HOSTS="$head $address=$role:1" "$here/node.sh" worker "$head"
    # A signal ends the node; its requests go to other workers. A node whose router is gone ends by itself.
    trap '"$here/node.sh" stop; exit 0' TERM INT
    while pgrep -u "$(id -u)" -x raylet >/dev/null; do sleep 1 & wait $!; done
    die "the node has ended"
    ;;
*) die "say alone, router, prefill, decode or draft" ;;
esac
