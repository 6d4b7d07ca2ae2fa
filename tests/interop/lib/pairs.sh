# Queue pairs: how many are in use, and which of them carried packets, by the counters of both sides.

# rf_channels_are NAME PORT PAIRS: that many are in use on the port of a switch, or of a guest with a control socket.
rf_channels_are() {
    [ "$(rf_ctl "$1" channels "$2" --json | jq -r .combined)" = "$3" ]
}

# pair_counts END PORT: "rx_queue_0_packets 12" and so on, one line each. END is `rf:NAME` for ringferry with a control socket, whose
# port is PORT, or `vm:NAME` for the device PORT of a Linux guest. rx is what the one who counts received.
pair_counts() {
    case $1 in
    rf:*) rf_ctl "${1#rf:}" stats "$2" --queues ;;
    vm:*) guest "${1#vm:}" 20 "ethtool -S $2" ;;
    esac | sed -n 's/^ *\([rt]x_queue_[0-9]*_packets\): \([0-9]*\)$/\1 \2/p'
}

# pairs_moved rx|tx BEFORE AFTER: the pairs that have carried packets that way between two pair_counts.
pairs_moved() {
    awk -v way="$1" 'NR == FNR { before[$1] = $2; next } $1 ~ "^" way && $2 > before[$1] { split($1, part, "_"); print part[3] }' \
        <(echo "$2") <(echo "$3") | sort -n | paste -sd' '
}

# pairs_carried WHO PAIRS BEFORE AFTER: exactly these pairs have carried packets, each way.
pairs_carried() {
    local way moved
    for way in rx tx; do
        moved=$(pairs_moved "$way" "$3" "$4")
        [ "$moved" = "$2" ] || fail "pairs of $1 that carried packets ($way): '$moved' in place of '$2'"
    done
}

# ns_flows NAMESPACE ADDRESS: 32 datagrams that are 32 flows, for whoever spreads by flow.
ns_flows() {
    in_ns "$1" bash -c "for flow in {1..32}; do echo \$flow >/dev/udp/$2/9; done"
}

# tap_queues_are NAMESPACE DEVICE NUMBER
tap_queues_are() {
    [ "$(in_ns "$1" find "/sys/class/net/$2/queues" -name 'tx-*' | wc -l)" = "$3" ]
}
