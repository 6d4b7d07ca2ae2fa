# ringferry as virtio driver (`ringferry guest`) of a device that DPDK serves (net_vhost), real kernels at both ends:
#
#   namespace a: tap - ringferry guest - testpmd (two net_vhost ports, each frame from one goes out of the other) - ringferry guest - tap: namespace b

case_add dpdk-net-vhost-mergeable 90 dnv_mergeable "mergeable receive buffers; this and the next three with split rings"
case_add dpdk-net-vhost-big 90 dnv_big "receive buffers of 64 KiB"
case_add dpdk-net-vhost-small 90 dnv_small "receive buffers of one frame, no offloads"
case_add dpdk-net-vhost-tso 90 dnv_tso "the device offers segmentation offload"
case_add dpdk-net-vhost-packed 180 dnv_packed "packed rings, with and without IN_ORDER, with each layout of receive buffers"
case_add dpdk-net-vhost-client 90 dnv_client "ringferry guest listens, testpmd connects"
case_add dpdk-net-vhost-jumbo 90 dnv_jumbo "MTU 9000"
case_add dpdk-net-vhost-restart 90 dnv_restart "testpmd killed and restarted: the driver connects again"
case_add dpdk-net-vhost-packed-restart 90 dnv_packed_restart "the same with packed rings"
case_add dpdk-net-vhost-multiqueue 180 dnv_multiqueue "two pairs: changed under checked traffic, then on testpmd's side between its starts"
case_add dpdk-net-vhost-packed-multiqueue 180 dnv_packed_multiqueue "the same with packed rings"
case_add dpdk-both 90 dnv_both "driver and device of ringferry with DPDK between: guest - net_vhost - virtio_user - switch"

# dnv_guests GUESTOPTION...: QUEUES is their number of queue pairs; with more than one they can be asked (rf_ctl guest-a).
dnv_guests() {
    local side n=0
    for side in a b; do
        n=$((n + 1))
        rf_launch "guest-$side" "$side" guest --socket "$RUN/$side.sock" --tap rf0 --address "10.9.0.$n/24" --mac "02:00:00:00:09:0$n" \
            ${QUEUES:+--queues "$QUEUES" --spread-at 0 --control "$RUN/guest-$side.control"} "$@"
    done
}

# dnv_testpmd DEVOPTIONS [TESTPMDARGUMENT...]
dnv_testpmd() {
    local device=$1
    shift
    testpmd_start testpmd "net_vhost0,iface=$RUN/a.sock$device" "net_vhost1,iface=$RUN/b.sock$device" -- --forward-mode=io "$@"
}

dnv_path() {
    rf_wait_ready guest-a
    wait_for 15 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no path through testpmd within 15 s"
}

dnv_traffic() {
    dnv_path
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do'
    ping_check ns:b 10.9.0.1 -s 20000
    traffic_server ns:b
    traffic_check ns:a 10.9.0.2 "$MOMENT" "${MODES[@]}"
}

dnv_end() {
    rf_stop guest-a
    rf_stop guest-b
    stop testpmd 10
}

# dnv_simple DEVOPTIONS "BITS" GUESTOPTION...: BITS as testpmd_agreed takes them: 15 is MRG_RXBUF, 34 RING_PACKED, 35 IN_ORDER.
dnv_simple() {
    local device=$1 bits=$2
    shift 2
    netns_add a b
    dnv_testpmd "$device"
    dnv_guests "$@"
    dnv_traffic
    # shellcheck disable=SC2086 # one word per bit
    testpmd_agreed testpmd $bits
    dnv_end
}

dnv_mergeable() { dnv_simple '' '15 -34 35' --ring split --rx mergeable; }
dnv_big() { dnv_simple ,tso=1 '-15 -34 -35' --ring split --in-order off --rx big; }
dnv_small() { dnv_simple '' '-15 -34 35' --ring split --rx small --no-offloads; }
dnv_tso() { dnv_simple ,tso=1 '15 -34 -35' --ring split --in-order off --rx mergeable; }

# One testpmd, one pair of drivers after another.
dnv_packed() {
    netns_add a b
    dnv_testpmd ,tso=1
    traffic_server ns:b
    dnv_packed_pair '15 35' --rx mergeable
    dnv_packed_pair '15 -35' --rx mergeable --in-order off
    dnv_packed_pair '-15 35' --rx big
    dnv_packed_pair '-15 -35' --rx big --in-order off
    dnv_packed_pair '-15 35' --rx small --no-offloads
    dnv_packed_pair '-15 -35' --rx small --no-offloads --in-order off
    stop testpmd 10
}

# dnv_packed_pair "BITS" GUESTOPTION...
dnv_packed_pair() {
    local bits=$1
    shift
    echo "== guests with $*"
    dnv_guests --ring packed "$@"
    dnv_path
    # shellcheck disable=SC2086 # one word per bit
    testpmd_agreed testpmd 28 29 34 $bits
    traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both
    rf_stop guest-a
    rf_stop guest-b
}

dnv_client() {
    netns_add a b
    dnv_guests --mode listen
    dnv_testpmd ,client=1
    dnv_traffic
    dnv_end
}

dnv_jumbo() {
    netns_add a b
    dnv_testpmd "" --max-pkt-len=9018 --tx-offloads=0x8000
    dnv_guests --mtu 9000
    dnv_path
    ping_check ns:a 10.9.0.2 -s 8972 -M 'do'
    traffic_server ns:b
    traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both rr
    UDP_SIZE=8900 traffic_one ns:a 10.9.0.2 1 udp
    dnv_end
}

dnv_restart() { dnv_killed '-34 35' --ring split; }
dnv_packed_restart() { dnv_killed '34 35' --ring packed; }

# dnv_killed "BITS" GUESTOPTION...
dnv_killed() {
    local bits=$1
    shift
    netns_add a b
    dnv_testpmd ''
    dnv_guests "$@"
    dnv_path
    local before killed gap
    before=$(rf_fd_count guest-a)
    # Rings are in use when the device dies.
    spawn flood ip netns exec "${PREFIX}a" ping -n -q -f -c 100000 10.9.0.2
    killed=$(now_ms)
    kill_hard testpmd
    # DPDK leaves its socket behind and does not bind over it.
    rm -f "$RUN/a.sock" "$RUN/b.sock"
    dnv_testpmd ''
    wait_for 20 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no traffic within 20 s of the restart"
    gap=$(($(now_ms) - killed))
    note "traffic resumed $((gap / 1000)).$(printf %03d $((gap % 1000))) s after SIGKILL"
    kill_hard flood
    traffic_server ns:b
    traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both udp
    # shellcheck disable=SC2086 # one word per bit
    testpmd_agreed testpmd $bits
    [ "$(rf_fd_count guest-a)" = "$before" ] || fail "ringferry guest had $before file descriptors before and has $(rf_fd_count guest-a) after"
    dnv_end
}

dnv_multiqueue() { dnv_pairs '-34 22' --ring split; }
dnv_packed_multiqueue() { dnv_pairs '34 22' --ring packed; }

# dnv_pairs "BITS" GUESTOPTION...: testpmd puts what it takes from a pair of one driver into the same pair of the other, and drops it
# when that is off, so both drivers use the same number.
dnv_pairs() {
    local bits=$1 side pairs changes=0 said
    shift
    netns_add a b
    INTERACTIVE=1 dnv_testpmd ,queues=2 --rxq=2 --txq=2
    QUEUES=2 dnv_guests "$@"
    dnv_path
    # shellcheck disable=SC2086 # one word per bit
    testpmd_agreed testpmd $bits
    traffic_server ns:b
    for side in a b; do
        check "the tap of $side has a queue for each pair" tap_queues_are "$side" rf0 2
        rf_ctl "guest-$side" steering rf0
    done
    dnv_pairs_carry 2
    for pairs in 0 3 65535; do
        ! said=$(rf_ctl guest-a channels rf0 combined $pairs 2>&1) || fail "the driver takes $pairs pairs of 2"
        [[ $said == *"between 1 and 2"* ]] || fail "the refusal of $pairs pairs does not say the range: $said"
    done
    rf_channels_are guest-a rf0 2 || fail "a refused number has changed something"

    traffic_launch during ns:a 10.9.0.2 6 tcp-both
    pairs=2
    while alive during; do
        pairs=$((3 - pairs))
        dnv_pairs_set $pairs
        ! alive during || changes=$((changes + 1))
    done
    traffic_join during
    note "changes of the number of pairs under traffic: $changes"
    [ $changes -ge 4 ] || fail "the checked traffic has ended after $changes changes of the number of pairs"

    for pairs in 1 2; do
        dnv_pairs_set $pairs
        testpmd_tell testpmd stop 'port stop all' "port config all rxq $pairs" "port config all txq $pairs" 'port start all' start
        dnv_path
        dnv_pairs_carry $pairs
    done
    dnv_end
}

dnv_pairs_set() {
    local side
    for side in a b; do rf_ctl "guest-$side" channels rf0 combined "$1" >/dev/null || fail "guest-$side refuses $1 pairs"; done
    for side in a b; do rf_channels_are "guest-$side" rf0 "$1" || fail "guest-$side does not use $1 pairs"; done
}

# dnv_pairs_carry PAIRS: checked traffic goes over exactly the first PAIRS.
dnv_pairs_carry() {
    local before_a before_b used
    used=$(seq -s ' ' 0 $(($1 - 1)))
    before_a=$(pair_counts rf:guest-a rf0)
    before_b=$(pair_counts rf:guest-b rf0)
    ns_flows a 10.9.0.2
    ns_flows b 10.9.0.1
    traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both udp
    pairs_carried guest-a "$used" "$before_a" "$(pair_counts rf:guest-a rf0)"
    pairs_carried guest-b "$used" "$before_b" "$(pair_counts rf:guest-b rf0)"
}

dnv_both() {
    netns_add a b
    rf_switch switch-b b "vhost-user:$RUN/b.sock" tap:rf0
    testpmd_start testpmd "net_vhost0,iface=$RUN/a.sock" "net_virtio_user0,path=$RUN/b.sock,mrg_rxbuf=1" -- --forward-mode=io
    rf_launch guest-a a guest --socket "$RUN/a.sock" --tap rf0 --address 10.9.0.1/24
    ns_up b rf0 2
    dnv_path
    traffic_server ns:b
    traffic_check ns:a 10.9.0.2 "$MOMENT" "${MODES[@]}"
    rf_stop guest-a
    stop testpmd 10
    rf_stop switch-b
}
