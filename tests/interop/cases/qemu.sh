# A stock Debian guest in QEMU on a vhost-user port of ringferry; the other end is the host's kernel on a tap of the same switch.

case_add qemu-client 180 qemu_client "QEMU connects to ringferry: ping, iperf3, checked traffic both ways, IPv6, offloads"
case_add qemu-server 180 qemu_server "QEMU listens, ringferry connects: the same"
case_add qemu-packed 240 qemu_packed "packed rings: ping, iperf3 and checked traffic both ways, and the guest reboots"
case_add qemu-packed-restart 180 qemu_packed_restart "packed rings, QEMU listens: ringferry ends and comes back, the guest's driver starts anew"
case_add qemu-jumbo 150 qemu_jumbo "MTU 9000 from the port to the guest"
case_add qemu-reboot 240 qemu_reboot "the guest reboots, then QEMU is killed and started anew, while one ringferry runs"
case_add qemu-client-restart 180 qemu_client_restart "ringferry killed and restarted, QEMU connects again: same guest, traffic resumes"
case_add qemu-server-restart 180 qemu_server_restart "the same with ringferry connecting to QEMU"
case_add qemu-two-guests 240 qemu_two_guests "two guests talk to each other through one switch"

# What Linux must have accepted on a default port: CSUM, GUEST_CSUM, GUEST_TSO4/6, HOST_TSO4/6, MRG_RXBUF, INDIRECT_DESC, EVENT_IDX, VERSION_1.
QEMU_DEFAULT_FEATURES=(0 1 7 8 11 12 15 28 29 32)

# qemu_bed client|server [PORTOPTIONS [DEVICEOPTIONS]]: switch with a tap at .1 in namespace a, guest vm2 at .2. Who listens is QEMU's role.
qemu_bed() {
    local role=$1 port=${2:-} device=${3:-}
    netns_add a
    if [ "$role" = client ]; then
        rf_switch switch a "vhost-user:$RUN/vm2.sock$port" "tap:rf0$port"
        vm_start vm2 "$RUN/vm2.sock" ,reconnect=1 "$device"
    else
        # QEMU waits for the other side before it runs the guest; ringferry retries until the socket is there.
        vm_start vm2 "$RUN/vm2.sock" ,server=on "$device"
        rf_switch switch a "vhost-user:$RUN/vm2.sock,mode=connect$port" "tap:rf0$port"
    fi
}

# The whole list of a stock guest against the host over the tap.
qemu_everything() {
    ns_up a rf0 1
    vm_wait vm2
    vm_up vm2 2
    vm_has_features vm2 "${QEMU_DEFAULT_FEATURES[@]}"
    ping_check ns:a 10.9.0.2
    ping_check vm:vm2 10.9.0.1
    ping_check vm:vm2 10.9.0.1 -s 1472 -M 'do'
    ping_check vm:vm2 10.9.0.1 -s 20000
    ping_check ns:a fd09::2
    traffic_server ns:a
    traffic_check vm:vm2 10.9.0.1 1 "${ALL_MODES[@]}"
    traffic_check vm:vm2 fd09::1 1 tcp-both udp
    iperf_server a
    iperf_check guest-to-host vm:vm2 10.9.0.1
    iperf_check host-to-guest vm:vm2 10.9.0.1 -R
    iperf_check udp-guest-to-host vm:vm2 10.9.0.1 -u -b 50M
    iperf_check udp-host-to-guest vm:vm2 10.9.0.1 -u -b 50M -R
    vm_off vm2
    rf_stop switch
}

qemu_client() {
    qemu_bed client
    qemu_everything
}

qemu_server() {
    qemu_bed server
    qemu_everything
}

qemu_packed() {
    qemu_bed client '' ,packed=on
    ns_up a rf0 1
    vm_wait vm2
    vm_up vm2 2
    vm_has_features vm2 "${QEMU_DEFAULT_FEATURES[@]}" 34
    rf_has_features switch vm2 RING_PACKED INDIRECT_DESC EVENT_IDX
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do'
    ping_check vm:vm2 10.9.0.1 -s 20000
    traffic_server ns:a
    traffic_check vm:vm2 10.9.0.1 1 "${MODES[@]}"
    iperf_server a
    iperf_check guest-to-host vm:vm2 10.9.0.1
    iperf_check host-to-guest vm:vm2 10.9.0.1 -R
    guest_ask vm2 'reboot -f' >/dev/null
    vm_wait vm2 2
    vm_up vm2 2
    vm_has_features vm2 34
    traffic_check vm:vm2 10.9.0.1 1 tcp-both udp
    vm_off vm2
    rf_stop switch
}

# With packed rings QEMU cannot tell a new back end where the old one got to: its virtio-net does not use GET/SET_INFLIGHT_FD, and at
# a disconnect it forgets the ring's index and wrap counter. Traffic may stay away then, and that is noted, but ringferry must go on and
# serve the guest as soon as its driver resets the device.
qemu_packed_restart() {
    qemu_bed server '' ,packed=on
    ns_up a rf0 1
    vm_wait vm2
    vm_up vm2 2
    vm_has_features vm2 34
    ping_check ns:a 10.9.0.2
    traffic_server ns:a
    local how
    for how in rf_stop kill_hard; do
        "$how" switch
        rf_switch switch a "vhost-user:$RUN/vm2.sock,mode=connect" tap:rf0
        ns_up a rf0 1
        check "the guest sees its link again" wait_for 10 guest vm2 5 'grep -q 1 /sys/class/net/eth0/carrier'
        if wait_for 2 in_ns a ping -n -q -c 1 -W 1 10.9.0.2; then note "traffic resumed after $how"; else note "no traffic after $how until the driver's reset"; fi
        rf_ctl switch show >"$LOG/after.$how.show"
        guest vm2 10 'd=$(readlink -f /sys/class/net/eth0/device) && cd /sys/bus/virtio/drivers/virtio_net && echo ${d##*/} >unbind && echo ${d##*/} >bind' ||
            fail "the guest's driver cannot be bound again"
        vm_up vm2 2
        wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no traffic within 10 s of the driver's reset"
        traffic_check vm:vm2 10.9.0.1 1 tcp-both udp
    done
    vm_off vm2
    rf_stop switch
}

qemu_jumbo() {
    qemu_bed client ,mtu=9000 ,host_mtu=9000
    ns_up a rf0 1 9000
    vm_wait vm2
    vm_up vm2 2
    vm_has_features vm2 3
    check "guest has MTU 9000" guest vm2 5 'grep -qx 9000 /sys/class/net/eth0/mtu'
    ping_check ns:a 10.9.0.2 -s 8000 -M 'do'
    ping_check vm:vm2 10.9.0.1 -s 8000 -M 'do'
    ping_check vm:vm2 10.9.0.1 -s 8972 -M 'do'
    traffic_server ns:a
    traffic_check vm:vm2 10.9.0.1 1 tcp tcp-reverse rr
    # Frames of 9000 bytes really cross, without segmentation offload: one UDP datagram each.
    UDP_SIZE=8900 traffic_one vm:vm2 10.9.0.1 1 udp
    vm_off vm2
    rf_stop switch
}

qemu_reboot() {
    qemu_bed client
    ns_up a rf0 1
    traffic_server ns:a
    local boot before
    vm_wait vm2
    before=$(rf_fd_count switch)
    for boot in 1 2; do
        vm_wait vm2 "$boot"
        vm_up vm2 2
        ping_check ns:a 10.9.0.2
        traffic_check vm:vm2 10.9.0.1 1 tcp-both udp
        [ "$boot" = 2 ] || guest_ask vm2 'reboot -f' >/dev/null
    done
    kill_hard vm2
    rm -rf "$LOG/vm2.share"
    vm_start vm2 "$RUN/vm2.sock" ,reconnect=1
    vm_wait vm2
    vm_up vm2 2
    traffic_check vm:vm2 10.9.0.1 1 tcp-both
    [ "$(rf_fd_count switch)" = "$before" ] || fail "ringferry had $before file descriptors before the reboots and has $(rf_fd_count switch) after"
    vm_off vm2
    rf_stop switch
}

# ringferry dies without a word and comes back; the guest is not touched.
qemu_restart() {
    local role=$1 mode='' killed gap boots
    [ "$role" = client ] || mode=,mode=connect
    qemu_bed "$role"
    ns_up a rf0 1
    vm_wait vm2
    vm_up vm2 2
    ping_check ns:a 10.9.0.2
    for _ in 1 2; do
        # Rings are in use when it dies.
        guest vm2 5 'ping -q -i 0.01 -c 2000 10.9.0.1 >/dev/null 2>&1 &'
        killed=$(now_ms)
        kill_hard switch
        rf_switch switch a "vhost-user:$RUN/vm2.sock$mode" tap:rf0
        ns_up a rf0 1
        wait_for 20 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no traffic within 20 s of the restart"
        gap=$(($(now_ms) - killed))
        note "traffic resumed $((gap / 1000)).$(printf %03d $((gap % 1000))) s after SIGKILL"
    done
    traffic_server ns:a
    traffic_check vm:vm2 10.9.0.1 1 "${MODES[@]}"
    boots=$(wc -l <"$LOG/vm2.share/boots")
    [ "$boots" = 1 ] || fail "the guest has booted $boots times"
    vm_off vm2
    rf_stop switch
}

qemu_client_restart() { qemu_restart client; }
qemu_server_restart() { qemu_restart server; }

qemu_two_guests() {
    netns_add a
    rf_switch switch a "vhost-user:$RUN/vm2.sock" "vhost-user:$RUN/vm3.sock" tap:rf0
    vm_start vm2 "$RUN/vm2.sock" ,reconnect=1
    vm_start vm3 "$RUN/vm3.sock" ,reconnect=1
    ns_up a rf0 1
    vm_wait vm2
    vm_wait vm3
    vm_up vm2 2
    vm_up vm3 3
    ping_check vm:vm2 10.9.0.3
    ping_check vm:vm3 10.9.0.2 -s 20000
    ping_check vm:vm2 10.9.0.1
    traffic_server vm:vm3
    traffic_check vm:vm2 10.9.0.3 1 "${MODES[@]}"
    # And the host with one of them: three ports learned.
    traffic_check ns:a 10.9.0.3 1 tcp-both
    guest vm3 5 'iperf3 -s >/dev/null 2>&1 & sleep 0.5'
    iperf_check guest-to-guest vm:vm2 10.9.0.3
    vm_off vm2
    vm_off vm3
    rf_stop switch
}
