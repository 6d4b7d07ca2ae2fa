# DPDK's virtio driver without a VM (net_virtio_user) on ringferry's device, and real kernels at both ends:
#
#   namespace a: tap - ringferry A - testpmd (two virtio_user ports, each frame from one goes out of the other) - ringferry B - tap: namespace b
#
# Two switches, because one would learn each address on two ports. testpmd takes no offloads here, so whatever the kernels leave to
# their tap (checksum, segmentation) ringferry has to do before the frame goes to testpmd.

case_add dpdk-virtio-user-mergeable 90 dvu_mergeable "mergeable receive buffers"
case_add dpdk-virtio-user-plain 90 dvu_plain "one buffer per frame"
case_add dpdk-virtio-user-in-order 90 dvu_in_order "the driver asks for IN_ORDER, large ring"
case_add dpdk-virtio-user-split 150 dvu_split "split rings: DPDK's in-order and vectorized paths"
case_add dpdk-virtio-user-packed 210 dvu_packed "packed rings: IN_ORDER, one buffer per frame, vectorized, sizes that are no power of two"
case_add dpdk-virtio-user-jumbo 90 dvu_jumbo "MTU 9000 over chained receive buffers"
case_add dpdk-virtio-user-packed-jumbo 150 dvu_packed_jumbo "packed rings, MTU 9000: chains in the ring, with and without IN_ORDER"
case_add dpdk-virtio-user-queues 90 dvu_queues "two queue pairs on both sides"
case_add dpdk-virtio-user-packed-queues 90 dvu_packed_queues "the same with packed rings"
case_add dpdk-virtio-user-multiqueue 240 dvu_multiqueue "four pairs and two workers; testpmd starts anew with 1, 4, 3, 2 of them"
case_add dpdk-virtio-user-packed-multiqueue 240 dvu_packed_multiqueue "the same with packed rings"
case_add dpdk-virtio-user-server 90 dvu_server "testpmd listens, ringferry connects; ringferry killed and restarted"
case_add dpdk-virtio-user-packed-server 90 dvu_packed_server "the same with packed rings"
case_add dpdk-virtio-user-loopback 60 dvu_loopback "testpmd answers pings on one port (icmpecho)"

# dvu_bed VDEVOPTIONS [TESTPMDARGUMENT...]: with MODE=connect ringferry connects, with MTU=9000 all is set up for that.
# PORT is for more options of its ports.
dvu_bed() {
    local mtu=${MTU:-}
    dvu_switches
    dvu_testpmd "$@"
    ns_up a rf0 1 "$mtu"
    ns_up b rf0 2 "$mtu"
    dvu_path
}

dvu_switches() {
    local mtu=${MTU:-}
    local port=${MODE:+,mode=$MODE}${mtu:+,mtu=$mtu}${PORT:-}
    netns_add a b
    rf_switch switch-a a "vhost-user:$RUN/a.sock$port" "tap:rf0${mtu:+,mtu=$mtu}"
    rf_switch switch-b b "vhost-user:$RUN/b.sock$port" "tap:rf0${mtu:+,mtu=$mtu}"
}

# dvu_testpmd VDEVOPTIONS [TESTPMDARGUMENT...]
dvu_testpmd() {
    local device=$1
    shift
    testpmd_start testpmd "net_virtio_user0,path=$RUN/a.sock,$device" "net_virtio_user1,path=$RUN/b.sock,$device" -- --forward-mode=io "$@"
}

dvu_path() {
    wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no path through testpmd within 10 s"
}

dvu_traffic() {
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do'
    ping_check ns:b fd09::1
    traffic_server ns:b
    traffic_check ns:a 10.9.0.2 "$MOMENT" "${MODES[@]}"
}

dvu_end() {
    stop testpmd 10
    rf_stop switch-a
    rf_stop switch-b
}

dvu_mergeable() {
    dvu_bed mrg_rxbuf=1,in_order=0
    dvu_traffic
    dvu_end
}

dvu_plain() {
    dvu_bed mrg_rxbuf=0,in_order=0
    dvu_traffic
    dvu_end
}

dvu_in_order() {
    dvu_bed mrg_rxbuf=1,in_order=1,queue_size=1024
    dvu_traffic
    dvu_end
}

# dvu_variant VDEVOPTIONS TXPATH RXPATH FEATURE...: one testpmd after another on the same switches, with traffic.
dvu_variant() {
    local device=$1 tx=$2 rx=$3 port
    shift 3
    echo "== variant $device"
    dvu_testpmd "$device"
    dvu_path
    testpmd_path testpmd Tx "$tx"
    testpmd_path testpmd Rx "$rx"
    for port in a b; do rf_has_features "switch-$port" "$port" "$@"; done
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do'
    traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both udp
    stop testpmd 10
}

# dvu_variants: a testpmd leaves its port ready for the next, whatever rings the next one asks for.
dvu_variants() {
    dvu_switches
    ns_up a rf0 1
    ns_up b rf0 2
    traffic_server ns:b
    "$@"
    rf_stop switch-a
    rf_stop switch-b
}

dvu_split() { dvu_variants dvu_split_variants; }

dvu_split_variants() {
    dvu_variant mrg_rxbuf=1,in_order=1 inorder inorder IN_ORDER MRG_RXBUF -RING_PACKED
    dvu_variant mrg_rxbuf=0,in_order=1 inorder inorder IN_ORDER -MRG_RXBUF -RING_PACKED
    # Only its receive side is vectorized with a split ring.
    dvu_variant mrg_rxbuf=0,in_order=0,vectorized=1 standard vectorized -IN_ORDER -MRG_RXBUF -RING_PACKED
}

dvu_packed() { dvu_variants dvu_packed_variants; }

dvu_packed_variants() {
    local standard='packed ring standard' mergeable='packed ring mergeable buffer' vectorized='packed ring vectorized'
    dvu_variant packed_vq=1,in_order=0 "$standard" "$mergeable" RING_PACKED -IN_ORDER MRG_RXBUF
    dvu_variant packed_vq=1,in_order=1 "$standard" "$mergeable" RING_PACKED IN_ORDER MRG_RXBUF
    dvu_variant packed_vq=1,in_order=0,mrg_rxbuf=0,queue_size=200 "$standard" "$standard" RING_PACKED -IN_ORDER -MRG_RXBUF
    dvu_variant packed_vq=1,in_order=1,queue_size=255 "$standard" "$mergeable" RING_PACKED IN_ORDER MRG_RXBUF
    # And from one layout to the other.
    dvu_variant packed_vq=0,in_order=0 standard 'mergeable buffer' -RING_PACKED -IN_ORDER
    if grep -q avx512vl /proc/cpuinfo; then
        SIMD=512 dvu_variant packed_vq=1,in_order=1,mrg_rxbuf=0,vectorized=1 "$vectorized" "$vectorized" RING_PACKED IN_ORDER -MRG_RXBUF
    else
        note "vectorized packed path not tested: this CPU has no AVX-512"
    fi
}

dvu_jumbo() {
    # 0x8000: send frames of several buffers. The buffers have 2 KiB, so a frame of 9000 bytes takes five.
    MTU=9000 dvu_bed mrg_rxbuf=1,in_order=0 --max-pkt-len=9018 --enable-scatter --tx-offloads=0x8000
    ping_check ns:a 10.9.0.2 -s 8972 -M 'do'
    UDP_SIZE=8900 dvu_traffic
    dvu_end
}

# Frames of five buffers, as chains in the ring. Not in indirect tables: in those of a packed ring DPDK (22.11, and later ones) marks the
# header as device-writable, which breaks the queue by VIRTIO 2.7.4.2, here as in QEMU.
dvu_packed_jumbo() {
    local in_order port
    MTU=9000 PORT=,indirect=off dvu_switches
    ns_up a rf0 1 9000
    ns_up b rf0 2 9000
    traffic_server ns:b
    for in_order in 0 1; do
        dvu_testpmd "packed_vq=1,mrg_rxbuf=1,in_order=$in_order" --max-pkt-len=9018 --enable-scatter --tx-offloads=0x8000
        dvu_path
        for port in a b; do rf_has_features "switch-$port" "$port" RING_PACKED -INDIRECT_DESC; done
        ping_check ns:a 10.9.0.2 -s 8972 -M 'do'
        UDP_SIZE=8900 traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both udp
        stop testpmd 10
    done
    rf_stop switch-a
    rf_stop switch-b
}

dvu_queues() { dvu_two_pairs in_order=0 -RING_PACKED -IN_ORDER; }
dvu_packed_queues() { dvu_two_pairs packed_vq=1,in_order=1 RING_PACKED IN_ORDER; }

# dvu_two_pairs VDEVOPTIONS FEATURE...
dvu_two_pairs() {
    # More than one pair needs a control queue, which testpmd answers itself.
    dvu_bed "mrg_rxbuf=1,cq=1,queues=2,$1" --rxq=2 --txq=2
    local port before_a before_b
    for port in a b; do
        rf_has_features "switch-$port" "$port" "${@:2}"
        check "both pairs of $port run" wait_for 5 rf_queues_are "switch-$port" "$port" runs runs runs runs
    done
    before_a=$(rf_queues switch-a a)
    before_b=$(rf_queues switch-b b)
    # ringferry spreads by flow, and testpmd sends on the pair it received from: 32 datagrams each way are 32 flows.
    ns_flows a 10.9.0.2
    ns_flows b 10.9.0.1
    dvu_traffic
    check "all queues of a were used" [ "$(rf_queues_used switch-a a "$before_a")" = "0 1 2 3" ]
    check "all queues of b were used" [ "$(rf_queues_used switch-b b "$before_b")" = "0 1 2 3" ]
    dvu_end
}

dvu_multiqueue() { dvu_pairs in_order=0 -RING_PACKED -IN_ORDER; }
dvu_packed_multiqueue() { dvu_pairs packed_vq=1,in_order=1 RING_PACKED IN_ORDER; }

# dvu_pairs VDEVOPTIONS FEATURE...: the port is stopped, its number of queues changed, and started, as a network function does it.
dvu_pairs() {
    local port pairs used
    WORKERS=2 INTERACTIVE=1 dvu_bed "mrg_rxbuf=1,cq=1,queues=4,$1" --rxq=4 --txq=4
    traffic_server ns:b
    for port in a b; do rf_has_features "switch-$port" "$port" "${@:2}"; done
    dvu_pairs_carry 4
    # All of them again at the end: what was off for a while comes back.
    for pairs in 1 4 3 2 4; do
        testpmd_tell testpmd stop 'port stop all' "port config all rxq $pairs" "port config all txq $pairs" 'port start all' start
        dvu_pairs_carry "$pairs"
    done
    dvu_end
}

# dvu_pairs_carry PAIRS: checked traffic goes over exactly the first PAIRS.
dvu_pairs_carry() {
    local before_a before_b used
    used=$(seq -s ' ' 0 $(($1 - 1)))
    check "a uses $1 pairs" wait_for 5 rf_channels_are switch-a a "$1"
    check "b uses $1 pairs" wait_for 5 rf_channels_are switch-b b "$1"
    dvu_path
    before_a=$(pair_counts rf:switch-a a)
    before_b=$(pair_counts rf:switch-b b)
    # ringferry spreads by flow, and testpmd sends on the pair it received from.
    ns_flows a 10.9.0.2
    ns_flows b 10.9.0.1
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do'
    traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both udp
    pairs_carried "port a" "$used" "$before_a" "$(pair_counts rf:switch-a a)"
    pairs_carried "port b" "$used" "$before_b" "$(pair_counts rf:switch-b b)"
}

dvu_server() { dvu_restart in_order=0 -RING_PACKED -IN_ORDER; }
dvu_packed_server() { dvu_restart packed_vq=1,in_order=1 RING_PACKED IN_ORDER; }

# dvu_restart VDEVOPTIONS FEATURE...
dvu_restart() {
    MODE=connect dvu_bed "mrg_rxbuf=1,server=1,$1"
    dvu_traffic
    local killed gap
    killed=$(now_ms)
    kill_hard switch-a
    rf_switch switch-a a "vhost-user:$RUN/a.sock,mode=connect" tap:rf0
    ns_up a rf0 1
    wait_for 20 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no traffic within 20 s of the restart"
    gap=$(($(now_ms) - killed))
    note "traffic resumed $((gap / 1000)).$(printf %03d $((gap % 1000))) s after SIGKILL"
    rf_has_features switch-a a "${@:2}"
    traffic_check ns:a 10.9.0.2 "$MOMENT" tcp-both
    dvu_end
}

dvu_loopback() {
    netns_add a
    rf_switch switch a "vhost-user:$RUN/a.sock" tap:rf0
    testpmd_start testpmd "net_virtio_user0,path=$RUN/a.sock,mrg_rxbuf=1" -- --forward-mode=icmpecho
    ns_up a rf0 1
    # It answers for every address.
    wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no answer within 10 s"
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do' -p 5a00ff
    # 5000 replies, each compared with what was sent.
    on ns:a 30 ping -n -q -f -c 5000 -s 500 10.9.0.2 || fail "flood ping"
    stop testpmd 10
    rf_stop switch
}
