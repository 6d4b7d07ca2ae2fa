# The versions to come: QEMU 10 and Linux 6.12, with MSI-X, where the other cases have 7.2 and 6.1 with one interrupt for all queues. As few
# cases as show each thing that the two could do differently: how a session begins, ends and comes back, and how a guest moves.

case_add qemu10-split 120 qemu10_split "split rings: checked traffic, ringferry killed and restarted, QEMU without shared memory" backports_fetch
case_add qemu10-packed 120 qemu10_packed "packed rings: checked traffic, the guest reboots" backports_fetch
case_add qemu10-multiqueue 120 qemu10_multiqueue "two pairs with an interrupt each: their number changes under checked traffic" backports_fetch
case_add qemu10-migrate-split 150 qemu10_migrate_split "three migrations in a row, one cancelled half-way" backports_fetch
case_add qemu10-migrate-packed 150 qemu10_migrate_packed "packed rings: two migrations" backports_fetch
case_add qemu10-migrate-multiqueue 150 qemu10_migrate_multiqueue "two pairs on two workers: two migrations" backports_fetch
case_add qemu10-migrate-save 120 qemu10_migrate_save "a guest is saved to a file and restored" backports_fetch

# qemu10_bed [DEVICE_OPTIONS]
qemu10_bed() {
    backports_use
    note "QEMU $("${QEMU[@]}" --version | sed -n 's/^QEMU emulator version \([0-9.]*\).*/\1/p')"
    qemu_bed client '' "${1:-}"
    ns_up a rf0 1
    traffic_server ns:a
    vm_wait vm2
    note "Linux $(guest vm2 5 uname -r)"
    vm_up vm2 2
    vm_has_features vm2 "${QEMU_DEFAULT_FEATURES[@]}"
}

qemu10_split() {
    local killed
    qemu10_bed
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do'
    ping_check vm:vm2 10.9.0.1 -s 20000
    traffic_check vm:vm2 10.9.0.1 1 tcp-both udp
    killed=$(now_ms)
    kill_hard switch
    rf_switch switch a "vhost-user:$RUN/vm2.sock" tap:rf0
    ns_up a rf0 1
    wait_for 20 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no traffic within 20 s of the restart"
    note "traffic resumed $(($(now_ms) - killed)) ms after SIGKILL"
    traffic_check vm:vm2 10.9.0.1 1 tcp-both
    vm_off vm2
    qemu_unshared
    rf_stop switch
}

# QEMU starts the device in a guest whose memory it cannot share; the switch must say so.
qemu_unshared() {
    rm -rf "$LOG/vm2.share"
    UNSHARED=1 vm_start vm2 "$RUN/vm2.sock" ,reconnect=1
    check "the port says that it has no memory" wait_for 60 qemu_state_is no-memory
    grep -q 'memory-backend-memfd.*share=on' "$LOG/switch.log" || fail "the log does not say what to write"
    kill_hard vm2
    check "the port waits for the next" wait_for 5 qemu_state_is listening
}

qemu_state_is() {
    [ "$(rf_ctl switch show --json | jq -r '.ports[] | select(.name == "vm2") | .state')" = "$1" ]
}

qemu10_packed() {
    qemu10_bed ,packed=on
    vm_has_features vm2 34
    ping_check vm:vm2 10.9.0.1 -s 20000
    traffic_check vm:vm2 10.9.0.1 1 tcp-both udp
    guest_ask vm2 'reboot -f' >/dev/null
    vm_wait vm2 2
    vm_up vm2 2
    traffic_check vm:vm2 10.9.0.1 1 tcp-both
    vm_off vm2
    rf_stop switch
}

qemu10_multiqueue() {
    local pairs before
    export QUEUES=2 WORKERS=2
    qemu10_bed
    vm_has_features vm2 22
    check "an interrupt for each queue" guest vm2 5 'grep -c "virtio.-\(in\|out\)put" /proc/interrupts | grep -qx 4'
    # Linux 6.12 does not tell ethtool what each queue carried.
    before=$(pair_counts rf:switch vm2)
    qmq_flows
    pairs_carried "the switch" "0 1" "$before" "$(pair_counts rf:switch vm2)"
    # The guest has one agent, which must be free to change the number.
    traffic_server vm:vm2
    traffic_launch during ns:a 10.9.0.2 4 tcp-both
    for pairs in 1 2 1 2; do
        check "pairs: $pairs" guest vm2 10 "ethtool -L eth0 combined $pairs"
        wait_for 5 rf_channels_are switch vm2 "$pairs" || fail "ctl channels does not say $pairs"
        sleep 0.5
    done
    traffic_join during
    before=$(pair_counts rf:switch vm2)
    qmq_flows
    pairs_carried "the switch" "0 1" "$before" "$(pair_counts rf:switch vm2)"
    vm_off vm2
    rf_stop switch
}

qemu10_migrate_split() {
    backports_use
    MIGRATE_DEVICE=''
    migrate_bed ''
    migrate_round 3 ''
    migrate_end
}

qemu10_migrate_packed() {
    backports_use
    MIGRATE_DEVICE=,packed=on,mrg_rxbuf=off
    migrate_bed "$MIGRATE_DEVICE"
    CANCEL=never migrate_round 2 "$MIGRATE_DEVICE"
    migrate_end
}

qemu10_migrate_multiqueue() {
    backports_use
    MIGRATE_DEVICE=''
    export QUEUES=2 WORKERS=2
    migrate_bed ''
    CANCEL=never migrate_round 2 ''
    migrate_end
}

qemu10_migrate_save() {
    backports_use
    migrate_save
}
