# DPDK's virtio driver without a VM (net_virtio_user) on ringferry's device, and real kernels at both ends:
#
#   namespace a: tap - ringferry A - testpmd (two virtio_user ports, each frame from one goes out of the other) - ringferry B - tap: namespace b
#
# Two switches, because one would learn each address on two ports. testpmd takes no offloads here, so whatever the kernels leave to
# their tap (checksum, segmentation) ringferry has to do before the frame goes to testpmd.

case_add dpdk-virtio-user-mergeable 90 dvu_mergeable "mergeable receive buffers"
case_add dpdk-virtio-user-plain 90 dvu_plain "one buffer per frame"
case_add dpdk-virtio-user-in-order 90 dvu_in_order "the driver asks for IN_ORDER, large ring"
case_add dpdk-virtio-user-jumbo 90 dvu_jumbo "MTU 9000 over chained receive buffers"
case_add dpdk-virtio-user-queues 90 dvu_queues "two queue pairs on both sides"
case_add dpdk-virtio-user-server 90 dvu_server "testpmd listens, ringferry connects; ringferry killed and restarted"
case_add dpdk-virtio-user-loopback 60 dvu_loopback "testpmd answers pings on one port (icmpecho)"

# dvu_bed VDEVOPTIONS [TESTPMDARGUMENT...]: with MODE=connect ringferry connects, with MTU=9000 all is set up for that.
dvu_bed() {
    local device=$1 mtu=${MTU:-}
    local port=${MODE:+,mode=$MODE}${mtu:+,mtu=$mtu}
    shift
    netns_add a b
    rf_switch switch-a a "vhost-user:$RUN/a.sock$port" "tap:rf0${mtu:+,mtu=$mtu}"
    rf_switch switch-b b "vhost-user:$RUN/b.sock$port" "tap:rf0${mtu:+,mtu=$mtu}"
    testpmd_start testpmd "net_virtio_user0,path=$RUN/a.sock,$device" "net_virtio_user1,path=$RUN/b.sock,$device" -- --forward-mode=io "$@"
    ns_up a rf0 1 "$mtu"
    ns_up b rf0 2 "$mtu"
    wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no path through testpmd within 10 s"
}

dvu_traffic() {
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do'
    ping_check ns:b fd09::1
    traffic_server ns:b
    traffic_check ns:a 10.9.0.2 1 "${MODES[@]}"
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

dvu_jumbo() {
    # 0x8000: send frames of several buffers. The buffers have 2 KiB, so a frame of 9000 bytes takes five.
    MTU=9000 dvu_bed mrg_rxbuf=1,in_order=0 --max-pkt-len=9018 --enable-scatter --tx-offloads=0x8000
    ping_check ns:a 10.9.0.2 -s 8972 -M 'do'
    UDP_SIZE=8900 dvu_traffic
    dvu_end
}

dvu_queues() {
    # More than one pair needs a control queue, which testpmd answers itself.
    dvu_bed mrg_rxbuf=1,in_order=0,cq=1,queues=2 --rxq=2 --txq=2
    local port before_a before_b
    for port in a b; do
        check "both pairs of $port run" wait_for 5 rf_queues_are "switch-$port" "$port" runs runs runs runs
    done
    before_a=$(rf_queues switch-a a)
    before_b=$(rf_queues switch-b b)
    # ringferry spreads by flow, and testpmd sends on the pair it received from: 32 datagrams each way are 32 flows.
    in_ns a bash -c 'for flow in {1..32}; do echo "$flow" >/dev/udp/10.9.0.2/9; done'
    in_ns b bash -c 'for flow in {1..32}; do echo "$flow" >/dev/udp/10.9.0.1/9; done'
    dvu_traffic
    check "all queues of a were used" [ "$(rf_queues_used switch-a a "$before_a")" = "0 1 2 3" ]
    check "all queues of b were used" [ "$(rf_queues_used switch-b b "$before_b")" = "0 1 2 3" ]
    dvu_end
}

dvu_server() {
    MODE=connect dvu_bed mrg_rxbuf=1,in_order=0,server=1
    dvu_traffic
    local killed gap
    killed=$(now_ms)
    kill_hard switch-a
    rf_switch switch-a a "vhost-user:$RUN/a.sock,mode=connect" tap:rf0
    ns_up a rf0 1
    wait_for 20 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no traffic within 20 s of the restart"
    gap=$(($(now_ms) - killed))
    note "traffic resumed $((gap / 1000)).$(printf %03d $((gap % 1000))) s after SIGKILL"
    traffic_check ns:a 10.9.0.2 1 tcp-both
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
