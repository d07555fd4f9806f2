#!/usr/bin/env bash
# Manages one host of a Ray cluster for Tandem. `ray up deploy/cluster.yaml` runs it over SSH; you can also run it:
#
#   deploy/node.sh head          start Ray's head here
#   deploy/node.sh worker HEAD   join the head at this address
#   deploy/node.sh serve         start `tandem serve` here; it logs to ~/tandem-serve.log
#   deploy/node.sh stop          end both here; on the head also end Ray on all other hosts
#
#   CLUSTER_HOSTS   each host's address and its number of workers of each role, as in
#                  "10.0.0.10 10.0.0.11=prefill:1 10.0.0.12=decode:2,draft:1". A head without roles takes no
#                  workers. Without CLUSTER_HOSTS Ray chooses the address, and hosts take workers of any role.
#   RAY_PORT       Ray's first port (6379). Ray uses ports +0 to +5 and +21 to +120; `tandem serve` and its workers
#                  use ports +121 to +220 (TANDEM_WORKER_PORTS).
#   RAY_HEAD_OPTIONS   further options of `ray start` on the head
#   REDIS_PASSWORD     password of the Redis at RAY_REDIS_ADDRESS, if Ray keeps its control store there
#
# Ray requires a token (~/.ray/auth_token, or the file RAY_AUTH_TOKEN_PATH), and `tandem serve` an API key
# (TANDEM_API_KEY, or ~/.tandem/api_key). The head makes both; the token must be the same on all hosts.
set -euo pipefail
here=$(cd "$(dirname "$(readlink -f "$0")")/.." && pwd)
ray=$here/.venv/bin/ray python=$here/.venv/bin/python
token=${RAY_AUTH_TOKEN_PATH:-~/.ray/auth_token} api_key=~/.tandem/api_key
serve_pid=~/.tandem/serve.pid serve_log=~/tandem-serve.log user=$(id -u)
port=${RAY_PORT:-6379}
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 AUTOSCALER_METRIC_PORT=$((port + 5))
# With listed hosts, version 2 of the autoscaler loses the head and starts nodes forever (Ray 2.60).
! grep -Eqs '"type": *"local"' ~/ray_bootstrap_config.yaml || export RAY_enable_autoscaler_v2=0
# A node ends this long after it lost its head. Ray's default is a minute.
export RAY_gcs_rpc_server_reconnect_timeout_s=${RAY_gcs_rpc_server_reconnect_timeout_s:-20}
# Like deploy/ray_cluster.py: by default Ray gives its workers the lowest priority, so they would fall silent while
# other programs start.
export RAY_worker_niceness=0 RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0
# The interval in seconds at which Ray checks whether to start nodes.
export AUTOSCALER_UPDATE_INTERVAL_S=1

die() { echo "node.sh: $*" >&2; exit 1; }
secret() { "$python" -c 'import secrets; print(secrets.token_hex(32), end="")'; }

# Sets `options` to this host's address and resources in CLUSTER_HOSTS.
own_options() {
    local host own address roles
    options=()
    [ -n "${CLUSTER_HOSTS:-}" ] || return 0
    own=" $(hostname -I)"
    for host in $CLUSTER_HOSTS; do
        address=${host%%=*} roles=${host#"$address"}
        [[ $host =~ ^[^=]+(=(prefill|decode|draft):[0-9]+(,(prefill|decode|draft):[0-9]+)*)?$ ]] ||
            die "CLUSTER_HOSTS: $host: after the address you can give =ROLE:NUMBER,..., where ROLE is prefill, decode or draft"
        [[ $own == *" $address "* ]] || continue
        options=("--node-ip-address=$address")
        if [ -n "$roles" ]; then
            options+=("--resources={\"$(sed 's/,/,"/g; s/:/":/g' <<<"${roles#=}")}")
        elif [ "$1" = head ]; then
            options+=(--num-cpus=0)
        fi
    done
    [ ${#options[@]} -gt 0 ] || die "CLUSTER_HOSTS: names none of this host's addresses:$own"
}

start_ray() {
    local tries=3 errors=${RAY_TMPDIR:-/tmp}/ray/session_latest/logs/raylet.err
    until (umask 077 && "$ray" start "$@" --log-color=false --disable-usage-stats --node-manager-port=$((port + 1)) \
        --object-manager-port=$((port + 2)) --runtime-env-agent-port=$((port + 3)) \
        --dashboard-agent-grpc-port=$((port + 4)) --min-worker-port=$((port + 21)) \
        --max-worker-port=$((port + 120)) </dev/null); do
        # If its agents take over 15 s to start, as on a busy host, Ray dies (2.60) and is not restarted.
        ((--tries)) && grep -qs "Timed out waiting for file" "$errors" || die "Ray cannot start"
        "$ray" stop >/dev/null
    done
    # Ray's log monitor would outlive the node.
    setsid bash -c 'tail --pid="$1" -f /dev/null; pkill -u "$2" -f /ray/_private/log_monitor.py' - \
        "$(pgrep -n -u "$user" -x raylet)" "$user" >/dev/null 2>&1 </dev/null &
}

case ${1:-} in
head)
    own_options head
    [ ! -f ~/ray_bootstrap_config.yaml ] || (cd "$here" && "$python" -m deploy.node check ~/ray_bootstrap_config.yaml)
    mkdir -p -m 700 ~/.ray ~/.tandem ~/.local/bin
    [ -s "$token" ] || (umask 077; secret >"$token")
    ln -sf "$here/deploy/ray" ~/.local/bin/ray # since `ray down` runs a bare `ray stop`
    grep -qs 'PATH=~/.local/bin' ~/.bashrc || echo 'PATH=~/.local/bin:$PATH' >>~/.bashrc
    [ ! -f ~/ray_bootstrap_config.yaml ] || options+=(--autoscaling-config="$HOME/ray_bootstrap_config.yaml")
    # shellcheck disable=SC2206 # words on purpose
    options+=(${RAY_HEAD_OPTIONS:-} ${REDIS_PASSWORD:+"--redis-password=$REDIS_PASSWORD"})
    start_ray --head --port="$port" --include-dashboard=false "${options[@]}"
    ;;
worker)
    [ $# -eq 2 ] || die "worker: give the head's address"
    own_options worker
    [ -s "$token" ] || die "worker: $token is missing; it must be the head's"
    start_ray --address="$2:$port" "${options[@]}"
    ;;
serve)
    mkdir -p -m 700 ~/.tandem
    if [ -z "${TANDEM_API_KEY:-}" ]; then
        [ -s "$api_key" ] || (umask 077; secret >"$api_key")
        TANDEM_API_KEY=$(<"$api_key")
        export TANDEM_API_KEY
    fi
    export TANDEM_WORKER_PORTS=${TANDEM_WORKER_PORTS:-$((port + 121))-$((port + 220))}
    cd "$here"
    (umask 077; exec setsid "$python" -m deploy serve --ray-address auto >"$serve_log" 2>&1 </dev/null) &
    echo $! >"$serve_pid"
    ;;
stop)
    if [ -s "$serve_pid" ] && pid=$(<"$serve_pid") && grep -qsz serve "/proc/$pid/cmdline"; then
        kill "$pid"
        for _ in $(seq 300); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
    fi
    rm -f "$serve_pid"
    pgrep -u "$user" -x 'raylet|gcs_server' >/dev/null || exit 0
    ! pgrep -u "$user" -x gcs_server >/dev/null || (cd "$here" && "$python" -m deploy.node end "$port")
    "$ray" stop >/dev/null
    ;;
*) die "give head, worker, serve or stop" ;;
esac
