#!/usr/bin/env bash
# The entry point of a container. `alone` runs a whole server; the others run one node each of a Ray cluster:
#
#   deploy/container.sh alone            `tandem serve` with a local Ray; further arguments are its options
#   deploy/container.sh router           `tandem serve` and the head of the Ray cluster, which takes no workers
#   deploy/container.sh prefill|decode|draft
#                                        a node that takes one worker of this role
#
#   ROUTER_HOST           the router's host (default: KubeRay's FQ_RAY_IP, else `router`)
#   RAY_AUTH_TOKEN_PATH   the file with Ray's token, on a volume that all containers share. The router makes it if it
#                         is missing.
#   START_TIMEOUT_S       how long a node waits for the router (120)
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
role=${1:-} router=${ROUTER_HOST:-${FQ_RAY_IP:-router}} port=${RAY_PORT:-6379}
address=$(hostname -I | cut -d ' ' -f 1)
# Only the object_store transport uses Ray's object store, and Docker's default /dev/shm has 64 MiB.
export RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES=${RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES:-$((80 << 20))}
# KubeRay sets it to 127.0.0.1 on the head: the router would listen only there, where no worker reaches it.
unset RAY_ADDRESS

die() { echo "container.sh: $*" >&2; exit 1; }
listens() { [ -s "$RAY_AUTH_TOKEN_PATH" ] && (exec 3<>"/dev/tcp/$router/$port") 2>/dev/null; }

# After the router's restart the token may be the old one for a moment; then `ray start` fails.
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
    # By its name: a router that is replaced may get another address.
    CLUSTER_HOSTS="$address=$role:1" "$here/node.sh" worker "$router"
    # A signal ends the node; its requests move to other workers. A node that loses its router ends by itself.
    trap '"$here/node.sh" stop; exit 0' TERM INT
    while pgrep -u "$(id -u)" -x raylet >/dev/null; do sleep 1 & wait $!; done
    die "the node has ended"
    ;;
*) die "give alone, router, prefill, decode or draft" ;;
esac
