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
case_add dpdk-both 90 dnv_both "driver and device of ringferry with DPDK between: guest - net_vhost - virtio_user - switch"

dnv_guests() {
    rf_launch guest-a a guest --socket "$RUN/a.sock" --tap rf0 --address 10.9.0.1/24 --mac 02:00:00:00:09:01 "$@"
    rf_launch guest-b b guest --socket "$RUN/b.sock" --tap rf0 --address 10.9.0.2/24 --mac 02:00:00:00:09:02 "$@"
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
    traffic_check ns:a 10.9.0.2 1 "${MODES[@]}"
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
    traffic_check ns:a 10.9.0.2 1 tcp-both
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
    traffic_check ns:a 10.9.0.2 1 tcp-both rr
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
    traffic_check ns:a 10.9.0.2 1 tcp-both udp
    # shellcheck disable=SC2086 # one word per bit
    testpmd_agreed testpmd $bits
    [ "$(rf_fd_count guest-a)" = "$before" ] || fail "ringferry guest had $before file descriptors before and has $(rf_fd_count guest-a) after"
    dnv_end
}

dnv_both() {
    netns_add a b
    rf_switch switch-b b "vhost-user:$RUN/b.sock" tap:rf0
    testpmd_start testpmd "net_vhost0,iface=$RUN/a.sock" "net_virtio_user0,path=$RUN/b.sock,mrg_rxbuf=1" -- --forward-mode=io
    rf_launch guest-a a guest --socket "$RUN/a.sock" --tap rf0 --address 10.9.0.1/24
    ns_up b rf0 2
    dnv_path
    traffic_server ns:b
    traffic_check ns:a 10.9.0.2 1 "${MODES[@]}"
    rf_stop guest-a
    stop testpmd 10
    rf_stop switch-b
}
