# Our own program in its three roles: the switch (`run`), the driver (`guest`) and the payload verifier (`traffic`).

# rf_start NAME NAMESPACE ARGUMENT...: `ringferry ARGUMENT...` in a namespace; returns when it says it is ready: a switch when its
# ports are set up, a guest when its link is up. So one that waits for its device is launched, and waited for later.
rf_start() {
    rf_launch "$@"
    rf_wait_ready "$1"
}

rf_launch() {
    local name=$1 namespace=$2
    shift 2
    # A plain file and not a pipe: it can be looked at again and again, and nobody waits in open.
    spawn "$name" ip netns exec "$PREFIX$namespace" "$RINGFERRY" "$@" --ready-fd 3 3>"$RUN/$name.ready"
}

rf_wait_ready() {
    wait_for 10 rf_ready_or_dead "$1" || fail "$1: not ready within 10 s"
    alive "$1" || fail "$1 did not start"
}

rf_ready_or_dead() {
    not_running "${PID[$1]}" || grep -qx READY "$RUN/$1.ready"
}

# rf_switch NAME NAMESPACE PORT...: a switch whose taps are in the namespace. WORKERS says how many threads move its packets.
rf_switch() {
    local name=$1 namespace=$2 port arguments=()
    shift 2
    for port in "$@"; do arguments+=(--port "$port"); done
    rf_start "$name" "$namespace" run ${WORKERS:+--workers "$WORKERS"} --control "$RUN/$name.control" "${arguments[@]}"
}

# rf_ctl NAME ARGUMENT...: asks a switch, or a guest with a control socket.
rf_ctl() {
    local name=$1
    shift
    "$RINGFERRY" ctl --control "$RUN/$name.control" "$@"
}

# rf_stop NAME: what it counted goes to NAME.show, then it must end cleanly on SIGTERM.
rf_stop() {
    local name=$1
    if [ -S "$RUN/$name.control" ]; then
        rf_ctl "$name" show >"$LOG/$name.show" 2>&1 || fail "ringferry ctl show failed for $name"
    fi
    stop "$name"
    [ "$STATUS" = 0 ] || fail "$name: exit code $STATUS after SIGTERM"
}

rf_fd_count() {
    find "/proc/${PID[$1]}/fd" -mindepth 1 2>/dev/null | wc -l
}

# rf_has_features NAME PORT FEATURE...: negotiated on that port of a switch; one with a minus in front must be off.
rf_has_features() {
    local name=$1 port=$2 features feature
    shift 2
    features=" $(rf_ctl "$name" show --json |
        jq -r --arg port "$port" '.ports[] | select(.name == $port) | .features | join(" ")') "
    for feature; do
        case $feature in
        -*) [[ $features != *" ${feature#-} "* ]] || fail "$name: ${feature#-} was negotiated on port $port:$features" ;;
        *) [[ $features == *" $feature "* ]] || fail "$name: $feature was not negotiated on port $port:$features" ;;
        esac
    done
}

# rf_queues NAME PORT: its virtqueues, one line each: index, whether it runs, and how many buffers it has returned so far, modulo 65536.
rf_queues() {
    rf_ctl "$1" show --json | jq -r --arg port "$2" '.ports[] | select(.name == $port) | .queues[] |
        "\(.index) \(if .broken then "broken" elif .started and .enabled then "runs" elif .started then "disabled" else "stopped" end) \(.last_used)"'
}

# rf_queues_are NAME PORT STATE...: in the order of their indices, and no others.
rf_queues_are() {
    local name=$1 port=$2
    shift 2
    [ "$(rf_queues "$name" "$port" | cut -d' ' -f2 | paste -sd' ')" = "$*" ]
}

# rf_queues_used NAME PORT BEFORE: the indices of those that returned buffers since BEFORE, which rf_queues printed.
rf_queues_used() {
    comm -13 <(sort <<<"$3") <(rf_queues "$1" "$2" | sort) | cut -d' ' -f1 | paste -sd' '
}

# rf_replace NAME NAMESPACE: another process takes over from a running switch, which then ends by itself.
rf_replace() {
    local name=$1 before=${PID[$1]}
    rf_start "$name" "$2" run --replace --control "$RUN/$name.control"
    wait_for 5 not_running "$before" || fail "$name: the process before does not end"
    wait "$before" || fail "$name: exit code $? of a process that was replaced"
}
