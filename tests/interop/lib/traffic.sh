# Traffic whose every byte is checked at the other end (`ringferry traffic`: sequence numbers and checksums), and the usual stock tools.
#
# An "end" is a namespace (`ns:NAME`) or a guest (`vm:NAME`). All ends of a case are in 10.9.0.0/24 and fd09::/64.

# tcp-both is both directions at once and so covers what the first two would; those are for the cases that show everything.
ALL_MODES=(tcp tcp-reverse tcp-both udp rr)
MODES=(tcp-both udp rr)
TRAFFIC_RUNS=0

# on END SECONDS COMMAND...: runs there, output to stdout, with a limit.
on() {
    local end=$1 limit=$2
    shift 2
    case $end in
    ns:*) timeout --foreground -k 1 "$limit" ip netns exec "$PREFIX${end#ns:}" "$@" ;;
    vm:*) guest "${end#vm:}" "$limit" "$@" ;;
    esac
}

# The path of our program at an end.
ringferry_at() {
    case $1 in
    ns:*) echo "$RINGFERRY" ;;
    vm:*) echo /bin/ringferry ;;
    esac
}

# traffic_server END: serves until the case ends.
traffic_server() {
    local end=$1 command
    command="$(ringferry_at "$end") traffic server --bind :: --port 7000"
    case $end in
    ns:*)
        # shellcheck disable=SC2086 # words of a command
        spawn "traffic-${end#ns:}" ip netns exec "$PREFIX${end#ns:}" $command
        wait_for 5 listening "${end#ns:}" || fail "traffic server does not listen"
        ;;
    vm:*) guest "${end#vm:}" 5 "$command >/share/traffic.log 2>&1 & sleep 0.5; kill -0 \$!" || fail "traffic server in the guest" ;;
    esac
}

listening() {
    in_ns "$1" ss -Hltn 'sport = 7000' | grep -q .
}

# Seconds of checked traffic between programs of this machine, in which thousands of packets pass: of an emulated guest it takes one.
MOMENT=0.3

# traffic_check CLIENT ADDRESS SECONDS MODE...: each mode in turn. A wrong byte, or nothing received, is a failure of the client.
traffic_check() {
    local client=$1 address=$2 seconds=$3 mode
    shift 3
    for mode; do traffic_one "$client" "$address" "$seconds" "$mode"; done
}

traffic_one() {
    local log
    log=$LOG/traffic.$((++TRAFFIC_RUNS)).$4
    echo "== traffic $4 $1 -> $2"
    traffic_client "$@" >"$log" 2>&1 || fail "payload-checked traffic: $4 from $1 to $2: $(tail -n 1 "$log")"
    cat "$log"
}

traffic_client() {
    local client=$1 address=$2 seconds=$3 mode=$4 arguments=()
    # UDP at a rate that every end here takes: what is lost because a receiver is slow would say nothing about the bytes.
    # 1452 bytes fill a frame of 1500 over IPv6.
    if [ "$mode" = udp ]; then arguments=(--rate "${UDP_RATE:-20000000}" --size "${UDP_SIZE:-1452}"); fi
    on "$client" $((${seconds%.*} + 15)) "$(ringferry_at "$client")" traffic client --to "$address" --port 7000 \
        --mode "$mode" --seconds "$seconds" --json "${arguments[@]}"
}

# traffic_launch NAME CLIENT ADDRESS SECONDS MODE: as traffic_check, in the background; traffic_join NAME says how it went.
traffic_launch() {
    local name=$1
    shift
    echo "== traffic $4 $1 -> $2 in the background: $name"
    # How it went is for traffic_join to say, so the ERR trap must not.
    traffic_client "$@" >"$LOG/$name.log" 2>&1 </dev/null || exit &
    PID["$name"]=$!
}

traffic_join() {
    wait "${PID[$1]}" || fail "payload-checked traffic in the background: $(tail -n 1 "$LOG/$1.log")"
    unset "PID[$1]"
    cat "$LOG/$1.log"
}

# ping_check END ADDRESS [ARGUMENT...]: ping compares the payload of each reply. The first packet may wait for a neighbour entry.
ping_check() {
    local end=$1 address=$2
    shift 2
    echo "== ping $end -> $address $*"
    on "$end" 20 ping -n -q -c 5 -i 0.1 -W 2 -w 15 "$@" "$address" || fail "ping $* from $end to $address"
}

# iperf_server NAMESPACE
iperf_server() {
    spawn "iperf3-$1" ip netns exec "$PREFIX$1" iperf3 -s
    wait_for 5 iperf_listening "$1" || fail "iperf3 server does not listen"
}

iperf_listening() {
    in_ns "$1" ss -Hltn 'sport = 5201' | grep -q .
}

# iperf_check LABEL END ADDRESS ARGUMENT...: the receiver's rate is noted.
iperf_check() {
    local label=$1 end=$2 address=$3 log rate
    shift 3
    log=$LOG/iperf.$label
    echo "== iperf3 $label $end -> $address $*"
    on "$end" 25 iperf3 -c "$address" -t 1 -f m --connect-timeout 3000 "$@" >"$log" 2>&1 || fail "iperf3 $label from $end: $(tail -n 1 "$log")"
    rate=$(sed -n 's/.* \([0-9.]*\) Mbits\/sec.*receiver.*/\1/p' "$log" | tail -n 1)
    [ -n "$rate" ] && [ "${rate%.*}" -gt 0 ] || fail "iperf3 $label: nothing received"
    note "iperf3 $label: $rate Mb/s"
}
