# Offloads that differ along the way, with DPDK's virtio driver in the middle and kernels that check every byte at both ends:
#
#   namespace a: tap with all offloads - ringferry A - testpmd (port 0 | port 1) - ringferry B - tap without any: namespace b
#
# testpmd's mode io would send on a checksum that was left out as if it was there. Its mode csum computes it, or leaves that to ringferry
# where the port may, and with `tso set` it leaves the cutting of long TCP packets to ringferry, too. Those come in by a port with LRO,
# and leave by one with TSO or not at all. As csum replaces checksums that are there as well, only io shows the far kernel what
# ringferry computed for DPDK.
#
# A case is one kind of ring and of receive buffers. In it the ports' sets of offloads change between a stop and a start, in pairs that
# bring each set to each of the two taps.

case_add dpdk-offloads-split 300 dof_split "split rings, mergeable receive buffers"
case_add dpdk-offloads-split-plain 300 dof_split_plain "split rings, IN_ORDER, one buffer of 64 KiB per packet"
case_add dpdk-offloads-packed 300 dof_packed "packed rings, IN_ORDER, mergeable receive buffers"
case_add dpdk-offloads-packed-plain 300 dof_packed_plain "packed rings, one buffer of 64 KiB per packet"

# Port 0's set, port 1's, and testpmd's mode.
DOF_PAIRS=("none none io" "none csum csum" "csum none csum" "takes gives csum" "gives takes csum" "all all csum")

# dof_set NAME RXCSUM LRO TXCSUM TSO TO FROM TO FROM: what is on, and what `ctl explain` says of TCP to and from the port
# (segments/checksums), first where it meets the tap with all offloads, then where it meets the one without any.
declare -A DOF_SETS=()
dof_set() { DOF_SETS[$1]=${*:2}; }
dof_set none off off off off cut/computed merged/verified single/untouched single/untouched
dof_set csum on off on off cut/left-out merged/left-out single/untouched single/computed
dof_set takes on on off off unsegmented/left-out merged/verified merged/verified single/untouched
dof_set gives off off on on cut/computed unsegmented/left-out single/untouched cut/computed
dof_set all on on on on unsegmented/left-out unsegmented/left-out merged/verified cut/computed

dof_split() { dof_mergeable packed_vq=0,in_order=0 -RING_PACKED -IN_ORDER; }
dof_split_plain() { dof_plain packed_vq=0,in_order=1 -RING_PACKED IN_ORDER; }
# Without indirect tables, for the reason that dpdk-virtio-user-packed-jumbo has.
dof_packed() { PORT=,indirect=off dof_mergeable packed_vq=1,in_order=1 RING_PACKED IN_ORDER; }
dof_packed_plain() { dof_plain packed_vq=1,in_order=0 RING_PACKED -IN_ORDER; }

# dof_mergeable VDEVOPTIONS FEATURE...: packets of many buffers, received (0x2000, SCATTER) and sent (0x8000, MULTI_SEGS).
dof_mergeable() {
    dof_bed "mrg_rxbuf=1,$1" --rx-offloads=0x2000 --tx-offloads=0x8000
    dof_pairs MRG_RXBUF "${@:2}"
}

# dof_plain VDEVOPTIONS FEATURE...: the largest buffers that DPDK has, and few of them.
dof_plain() {
    dof_bed "mrg_rxbuf=0,$1" --mbuf-size=65535 --total-num-mbufs=1600
    dof_pairs -MRG_RXBUF "${@:2}"
}

# dof_bed VDEVOPTIONS TESTPMDARGUMENT...: PORT is for more options of ringferry's ports.
dof_bed() {
    local device=$1
    shift
    netns_add a b
    rf_switch switch-a a "vhost-user:$RUN/a.sock${PORT:-}" tap:rf0
    rf_switch switch-b b "vhost-user:$RUN/b.sock${PORT:-}" tap:rf0,offloads=off
    INTERACTIVE=1 testpmd_start testpmd "net_virtio_user0,path=$RUN/a.sock,$device" "net_virtio_user1,path=$RUN/b.sock,$device" -- "$@"
    # Frames keep their addresses in the mode csum, too.
    testpmd_tell testpmd stop 'csum mac-swap off 0' 'csum mac-swap off 1' start
    ns_up a rf0 1
    ns_up b rf0 2
    traffic_server ns:a
    traffic_server ns:b
}

# dof_pairs FEATURE...: those that have nothing to do with offloads.
dof_pairs() {
    local pair a b mode
    for pair in "${DOF_PAIRS[@]}"; do
        read -r a b mode <<<"$pair"
        dof_pair "$a" "$b" "$mode" "$@"
    done
    stop testpmd 10
    rf_stop switch-a
    rf_stop switch-b
}

# dof_pair SETOFA SETOFB MODE FEATURE...
dof_pair() {
    local a=$1 b=$2 commands before
    echo "== testpmd with the offloads $a and $b"
    mapfile -t commands < <(dof_commands 0 "$a"; dof_commands 1 "$b")
    testpmd_tell testpmd stop 'port stop all' "set fwd $3" "${commands[@]}" 'clear port xstats all' 'port start all' start
    shift 3
    wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no path through testpmd with $a and $b within 10 s"
    dof_agreed a "$a" "$@"
    dof_agreed b "$b" "$@"
    before=$(dof_counters)
    traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both udp
    traffic_check ns:b 10.9.0.1 "$MOMENT" udp
    traffic_check ns:a fd09::2 "$MOMENT" tcp-both udp
    traffic_check ns:b fd09::1 "$MOMENT" udp
    dof_counted a "$a" "$before"
    dof_counted b "$b" "$before"
    dof_long "$a" "$b"
}

# dof_commands TESTPMDPORT SET: what gives the port that set. 1428 bytes are a segment of a packet of 1500 over IPv6.
dof_commands() {
    local rx lro tx tso
    read -r rx lro tx tso _ <<<"${DOF_SETS[$2]}"
    printf "port config $1 %s\n" "rx_offload udp_cksum $rx" "rx_offload tcp_cksum $rx" "rx_offload tcp_lro $lro" \
        "tx_offload udp_cksum $tx" "tx_offload tcp_cksum $tx"
    # It turns TCP_TSO on and off, too.
    [ "$tso" = on ] && echo "tso set 1428 $1" || echo "tso set 0 $1"
}

# dof_agreed END SET FEATURE...: it was negotiated, and `ctl explain` says what follows from it.
dof_agreed() {
    local end=$1 set=$2 rx lro tx tso kind
    shift 2
    read -r rx lro tx tso _ <<<"${DOF_SETS[$set]}"
    rf_has_features "switch-$end" "$end" "$@" "$(dof_sign "$rx")GUEST_CSUM" "$(dof_sign "$lro")GUEST_TSO4" "$(dof_sign "$lro")GUEST_TSO6" \
        "$(dof_sign "$tx")CSUM" "$(dof_sign "$tso")HOST_TSO4" "$(dof_sign "$tso")HOST_TSO6"
    for kind in "TCP over IPv4" "TCP over IPv6"; do
        dof_explained "$end" rf0 "$end" "$kind" "$(dof_ways "$end" "$set" to)"
        dof_explained "$end" "$end" rf0 "$kind" "$(dof_ways "$end" "$set" from)"
    done
}

dof_sign() { [ "$1" = on ] || echo -; }

# dof_ways END SET to|from
dof_ways() {
    local ways
    read -r -a ways <<<"${DOF_SETS[$2]}"
    case $1-$3 in
    a-to) echo "${ways[4]}" ;;
    a-from) echo "${ways[5]}" ;;
    b-to) echo "${ways[6]}" ;;
    b-from) echo "${ways[7]}" ;;
    esac
}

# dof_explained END FROM TO KIND WANTED
dof_explained() {
    local said
    said=$(rf_ctl "switch-$1" explain "$1" --json | jq -r --arg from "$2" --arg to "$3" --arg kind "$4" \
        '.ways[] | select(.from == $from and .to == $to) | .traffic[] | select(.kind == $kind) | "\(.segments)/\(.checksums)"')
    [ "$said" = "$5" ] || fail "ctl explain: $4 from $2 to $3 is $said in place of $5"
}

# dof_counters: a line "END PORT TX_SOFTWARE TX_COALESCED" for each port of the two switches.
dof_counters() {
    local end
    for end in a b; do
        rf_ctl "switch-$end" show --json |
            jq -r --arg side "$end" '.ports[] | "\($side) \(.name) \(.counters.tx_software) \(.counters.tx_coalesced)"'
    done
}

# dof_counted END SET BEFORE: the switch did what it said since dof_counters printed BEFORE, and nothing else.
dof_counted() {
    local end=$1 set=$2 before=$3 now
    now=$(dof_counters)
    dof_did "$(dof_ways "$end" "$set" to)" "$end $end" "$before" "$now"
    dof_did "$(dof_ways "$end" "$set" from)" "$end rf0" "$before" "$now"
}

# dof_did WAY "END PORT" BEFORE NOW
dof_did() {
    local way=$1 port=$2 software coalesced software_now coalesced_now
    read -r software coalesced < <(sed -n "s/^$port //p" <<<"$3")
    read -r software_now coalesced_now < <(sed -n "s/^$port //p" <<<"$4")
    case $way in
    cut/* | */computed) dof_some "$port: $way: tx_software" on $((software_now - software)) ;;
    *) dof_some "$port: $way: tx_software" off $((software_now - software)) ;;
    esac
    case $way in
    merged/*) dof_some "$port: $way: tx_coalesced" on $((coalesced_now - coalesced)) ;;
    # Long packets of a flow may still become longer ones.
    unsegmented/*) ;;
    *) dof_some "$port: $way: tx_coalesced" off $((coalesced_now - coalesced)) ;;
    esac
}

# dof_long SETOFA SETOFB: DPDK says that it got long packets where it asked for them, and sent them where it may: those are what is cut
# on the way to b.
dof_long() {
    local counts port=0 set lro tso
    testpmd_tell testpmd 'show port xstats all' stop start
    # rx and tx of port 0, then of port 1.
    mapfile -t counts < <(said testpmd | sed -n 's/^[rt]x_q0_size_1519_max_packets: //p' | tail -n 4)
    for set; do
        read -r _ lro _ tso _ <<<"${DOF_SETS[$set]}"
        dof_some "port $port, $set: long packets received" "$lro" "${counts[2 * port]}"
        dof_some "port $port, $set: long packets sent" "$tso" "${counts[2 * port + 1]}"
        port=1
    done
}

# dof_some WHAT on|off COUNT: some, or none.
dof_some() {
    echo "== $1: $3"
    case $2 in
    on) [ "$3" -gt 0 ] || fail "$1: none" ;;
    off) [ "$3" = 0 ] || fail "$1: $3" ;;
    esac
}
