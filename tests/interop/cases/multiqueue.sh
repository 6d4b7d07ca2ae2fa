# Several queue pairs with stock guests. QEMU answers the guest's control queue itself, so a change of the number of pairs reaches
# ringferry as SET_VRING_ENABLE.
#
#   vm2: two CPUs, two pairs; vm3: one CPU, two pairs offered, so its driver uses one; the host over a tap with a queue per worker.

case_add qemu-multiqueue 900 qemu_multiqueue "two workers: ethtool changes the number of pairs twenty times under iperf3 and checked traffic"
case_add qemu-multiqueue-one-worker 600 qemu_multiqueue_one_worker "the same with one worker and fewer changes"
case_add qemu-multiqueue-netboot 600 qemu_multiqueue_netboot "firmware boots the guest through one pair, Linux goes on with two, and again after a reboot"

qemu_multiqueue() { qmq_guests 2 20; }
qemu_multiqueue_one_worker() { qmq_guests 1 4; }

# qmq_guests WORKERS CHANGES
qmq_guests() {
    local workers=$1 changes=$2
    netns_add a
    WORKERS=$workers rf_switch switch a "vhost-user:$RUN/vm2.sock" "vhost-user:$RUN/vm3.sock" tap:rf0
    QUEUES=2 vm_start vm2 "$RUN/vm2.sock" ,reconnect=1
    QUEUES=2 CPUS=1 vm_start vm3 "$RUN/vm3.sock" ,reconnect=1
    ns_up a rf0 1
    check "the tap has a queue for each worker" tap_queues_are a rf0 "$workers"
    vm_wait vm2
    vm_wait vm3
    vm_up vm2 2
    vm_up vm3 3
    vm_has_features vm2 22
    vm_has_features vm3 22
    traffic_server ns:a
    traffic_server vm:vm2
    traffic_server vm:vm3

    check "both pairs of vm2 run" wait_for 5 rf_queues_are switch vm2 runs runs runs runs
    qmq_steering "$workers"
    qmq_carries "0 1"
    qmq_one_of_two
    qmq_refused
    qmq_changes "$changes"

    # It has one already when the number of changes was odd.
    check "one pair" guest vm2 10 'ethtool -l eth0 | tail -n 2 | grep -q "Combined:.*1" || ethtool -L eth0 combined 1'
    check "the second pair is off" wait_for 5 rf_queues_are switch vm2 runs runs disabled disabled
    qmq_carries 0
    # A new driver starts with as many as it has CPUs, whatever the last one did.
    check "the driver is bound anew" guest vm2 20 'd=$(readlink -f /sys/class/net/eth0/device) && cd /sys/bus/virtio/drivers/virtio_net &&
        echo ${d##*/} >unbind && echo ${d##*/} >bind'
    vm_up vm2 2
    check "both pairs run again" wait_for 5 rf_queues_are switch vm2 runs runs runs runs
    qmq_carries "0 1"
    vm_off vm2
    vm_off vm3
    rf_stop switch
}

# qmq_steering WORKERS: who serves which pair.
qmq_steering() {
    local seen
    rf_ctl switch channels vm2
    rf_ctl switch steering vm2
    rf_channels_are switch vm2 2 || fail "ctl channels does not say 2 pairs"
    seen=$(rf_ctl switch steering vm2 --json | jq -r '[.queues[] | "\(.queue):\(.worker):\(.enabled)"] | join(" ")')
    [ "$seen" = "0:0:true 1:$(($1 - 1)):true" ] || fail "ctl steering says $seen"
}

# qmq_carries PAIRS: checked traffic between vm2 and the host takes exactly these pairs, as the guest and as the switch count. The guest
# sends on the pair of the CPU it sends from; what it receives is spread by flow.
qmq_carries() {
    local vm rf
    vm=$(pair_counts vm:vm2 eth0)
    rf=$(pair_counts rf:switch vm2)
    qmq_flows
    traffic_check vm:vm2 10.9.0.1 1 "${MODES[@]}"
    pairs_carried "the guest" "$1" "$vm" "$(pair_counts vm:vm2 eth0)"
    pairs_carried "the switch" "$1" "$rf" "$(pair_counts rf:switch vm2)"
}

# Some for each pair, both ways.
qmq_flows() {
    guest vm2 20 'for mask in 1 2; do taskset $mask ping -q -c 1 -W 2 10.9.0.1 >/dev/null || exit; done' || fail "ping from each CPU"
    ns_flows a 10.9.0.2
}

# A guest that uses fewer pairs than it was offered gets everything on those.
qmq_one_of_two() {
    local before
    check "the guest with one CPU uses one pair" wait_for 5 rf_channels_are switch vm3 1
    before=$(pair_counts rf:switch vm3)
    ns_flows a 10.9.0.3
    ping_check ns:a 10.9.0.3
    traffic_check vm:vm2 10.9.0.3 1 "${MODES[@]}"
    traffic_check vm:vm3 10.9.0.1 1 tcp-both
    pairs_carried "vm3's port" 0 "$before" "$(pair_counts rf:switch vm3)"
}

# Numbers that no one may take, and who may not choose.
qmq_refused() {
    local pairs said
    for pairs in 0 3 256; do
        ! guest vm2 10 "ethtool -L eth0 combined $pairs" || fail "the guest takes $pairs pairs of 2"
    done
    check "the number is what it was" guest vm2 10 "ethtool -l eth0 | tail -n 2 | grep -q 'Combined:.*2'"
    ! said=$(rf_ctl switch channels vm2 combined 1 2>&1) || fail "the switch takes pairs from a guest"
    [[ $said == *"ethtool -L"* ]] || fail "the switch does not say who decides: $said"
    rf_queues_are switch vm2 runs runs runs runs || fail "a refused change has changed something"
}

# qmq_changes NUMBER: the second pair goes off and on. Frames that are in its rings then must not hold up the rest: every connection
# that was there at the first change is there after the last, and data moves.
qmq_changes() {
    local wanted=$1 changes=0 pairs=2 round=0 begin states connections
    iperf_server a
    check "iperf3 in the guest" guest vm2 10 'iperf3 -c 10.9.0.1 -t 3600 -b 20M -P 2 --bidir --forceflush >/tmp/iperf 2>&1 &'
    # Two each way, and the one for control.
    wait_for 20 qmq_connections_are 5 || fail "iperf3 has not made 5 connections: $(qmq_connections)"
    connections=$(qmq_connections)
    begin=$(now_ms)
    while [ "$changes" -lt "$wanted" ]; do
        traffic_launch "during$((++round))" ns:a 10.9.0.2 10 tcp-both
        while alive "during$round"; do
            pairs=$((3 - pairs)) states="runs runs runs runs"
            check "$pairs pairs are taken" guest vm2 20 "ethtool -L eth0 combined $pairs && ethtool -l eth0 | tail -n 2 | grep -q 'Combined:.*$pairs'"
            [ "$pairs" = 2 ] || states="runs runs disabled disabled"
            # shellcheck disable=SC2086 # one word per queue
            check "pairs: $pairs" wait_for 5 rf_queues_are switch vm2 $states
            rf_channels_are switch vm2 "$pairs" || fail "ctl channels does not say $pairs"
            ! alive "during$round" || changes=$((changes + 1))
        done
        traffic_join "during$round"
    done
    note "$changes changes of the number of pairs under traffic in $((($(now_ms) - begin) / 1000)) s"
    [ "$(qmq_connections)" = "$connections" ] || fail "iperf3 has lost a connection: $(qmq_connections)"
    check "iperf3 goes on both ways" wait_for 15 guest vm2 5 'for way in TX RX; do
        grep "SUM..$way-C" /tmp/iperf | tail -n 1 | grep -v " 0.00 Bytes" || exit; done'
    check "iperf3 ends" guest vm2 10 'killall -INT iperf3; sleep 1; cat /tmp/iperf | tail -n 20'
    stop iperf3-a
}

qmq_connections_are() {
    [ "$(qmq_connections | wc -l)" = "$1" ]
}

# The other ends of iperf3's connections.
qmq_connections() {
    in_ns a ss -Htn state established 'sport = 5201' | awk '{ print $4 }' | sort
}

qmq_one_is_set_up() {
    [ "$(rf_ctl switch channels vm2 --json | jq -r '"\(.combined) of \(.started)"')" = "1 of 1" ]
}

# iPXE does not know of several pairs: the switch must not use those it leaves alone.
qemu_multiqueue_netboot() {
    local boot fds=''
    netns_add a
    WORKERS=2 rf_switch switch a "vhost-user:$RUN/vm2.sock" tap:rf0
    ns_up a rf0 1
    netboot_serve a rf0 1 2
    traffic_server ns:a
    NETBOOT=1 QUEUES=2 vm_start vm2 "$RUN/vm2.sock" ,reconnect=1
    for boot in 1 2; do
        check "firmware $boot sets up one pair" wait_for 120 qmq_one_is_set_up
        vm_wait vm2 "$boot"
        vm_up vm2 2
        vm_has_features vm2 22
        check "Linux $boot uses two" wait_for 5 rf_queues_are switch vm2 runs runs runs runs
        [ -n "$fds" ] || fds=$(rf_fd_count switch)
        qmq_carries "0 1"
        [ "$boot" = 2 ] || guest_ask vm2 'reboot -f' >/dev/null
    done
    [ "$(rf_fd_count switch)" = "$fds" ] || fail "ringferry had $fds file descriptors before the reboot and has $(rf_fd_count switch) after"
    vm_off vm2
    rf_stop switch
}
