# Live migration of a stock Debian guest between ports of one switch and of two, under checked traffic both ways.
#
#   switch one: ports p0 and p1, tap rf0 ─┐
#                                         ├─ bridge br0, 10.9.0.1
#   switch two: port p2, tap rf1 ─────────┘

case_add migrate-split 300 migrate_split "twenty migrations in a row, to and fro, within a switch and between two; one is cancelled half-way"
case_add migrate-packed 180 migrate_packed "packed rings: six migrations in a row"
case_add migrate-multiqueue 240 migrate_multiqueue "two pairs on two workers: four migrations in a row, one cancelled"
case_add migrate-dpdk 180 migrate_dpdk "for comparison: the same guest and traffic on DPDK's vhost ports, two migrations in a row (MIGRATIONS=)"
case_add migrate-save 120 migrate_save "a guest is saved to a file and restored, as virsh save does; post-copy is refused cleanly"

# What the guest does while it is moved: checked TCP both ways and numbered datagrams, again and again, until the host says that it is
# over; then a file that lay in its memory all the time must be what it was. UDP may lose datagrams and TCP may wait, but no byte may
# be wrong.
MIGRATE_WORK='
ip link set lo up
dd if=/dev/urandom of=/tmp/ballast bs=1M count=24 2>/dev/null
sha256sum /tmp/ballast >/tmp/sum
while ! timeout 10 wget -q -O /dev/null http://10.9.0.1:7009/over; do
    ringferry traffic client --to 10.9.0.1 --port 7001 --mode udp --size 1452 --rate 11616000 --seconds 3 --wait 5 --json & udp=$!
    ringferry traffic client --to 10.9.0.1 --port 7000 --mode tcp-both --seconds 3 --wait 5 --json || { echo "checked TCP failed"; exit 1; }
    wait $udp || { echo "checked UDP failed"; exit 1; }
done
sha256sum -c /tmp/sum || { echo "memory of the guest was damaged"; exit 1; }
'

# migrate_bed DEVICE_OPTIONS: both switches, and the guest at work.
migrate_bed() {
    netns_add a
    rf_switch one a "vhost-user:$RUN/p0" "vhost-user:$RUN/p1" tap:rf0
    rf_switch two a "vhost-user:$RUN/p2" tap:rf1
    in_ns a ip link add br0 type bridge
    in_ns a ip link set rf0 master br0 up
    in_ns a ip link set rf1 master br0 up
    ns_up a br0 1
    migrate_begins "$1"
    memory_flood a 10.9.0.77 52:54:00:00:00:02
}

# migrate_begins DEVICE_OPTIONS: the guest as a2 on the port p0, at work. Sets WORKING to the number of its work.
migrate_begins() {
    VM_KERNEL_OPTIONS=init_on_alloc=0 VM_OPTIONS=$(vm_qmp a2) vm_start a2 "$RUN/p0" ,reconnect=1 "$1"
    qmp_open a2
    vm_wait a2
    vm_up a2 2
    traffic_server ns:a
    spawn traffic-udp ip netns exec "${PREFIX}a" "$RINGFERRY" traffic server --bind :: --port 7001
    away_serve a
    WORKING=$(vm_away a2 "$MIGRATE_WORK")
    check "the guest is at work" wait_for 30 migrate_works
}

migrate_works() {
    in_ns a ss -Htn state established '( sport = 7000 or sport = 7001 )' | grep -q .
}

# migrate_round COUNT DEVICE_OPTIONS: COUNT migrations in a row, each to the next port; HERE_NOW is the name of the guest afterwards. The one with the
# number CANCEL, the second where nothing is said, is cancelled first.
migrate_round() {
    local count=$1 device=$2 i to letters=(a b c) port=0
    HERE_NOW=a2
    for ((i = 1; i <= count; i++)); do
        port=$((i % 3))
        to=${letters[i % 3]}2
        vm_twin a2 "$to" "$RUN/p$port" "$device"
        [ "$i" != "${CANCEL:-2}" ] || migrate_cancelled "$HERE_NOW" "$to"
        vm_migrate "$HERE_NOW" "$to"
        HERE_NOW=$to
        # The host finds it there, although the tables of both switches and of the bridge knew it elsewhere until it announced itself.
        check "the host reaches the guest after migration $i" wait_for 60 in_ns a ping -n -q -c 1 -W 2 10.9.0.2
    done
}

# migrate_cancelled NAME OTHER: begins, and cancels while pages are being sent: the guest stays where it is.
migrate_cancelled() {
    qmp "$1" '{"execute":"migrate-set-parameters","arguments":{"max-bandwidth":4194304}}'
    qmp "$1" "{\"execute\":\"migrate\",\"arguments\":{\"uri\":\"unix:$RUN/$2.incoming\"}}" || fail "$1 cannot be migrated"
    wait_for 10 migration_is "$1" active || fail "the migration does not begin"
    check "writes are logged" wait_for 10 grep -q "are logged now" "$LOG/one.log" "$LOG/two.log"
    in_ns a ping -n -q -c 3 -i 0.1 -W 1 10.9.0.2 || fail "no traffic during the migration"
    qmp "$1" '{"execute":"migrate_cancel"}'
    wait_for 10 migration_is "$1" cancelled || fail "the migration is not cancelled"
    check "writes are logged no more" wait_for 10 grep -q "are not logged any more" "$LOG/one.log" "$LOG/two.log"
    in_ns a ping -n -q -c 3 -i 0.1 -W 1 10.9.0.2 || fail "no traffic after the migration was cancelled"
    qmp "$1" '{"execute":"migrate-set-parameters","arguments":{"max-bandwidth":1073741824}}'
    # The other end has given up with its source.
    vm_leave "$2"
    vm_twin a2 "$2" "$RUN/p$(rf_port_of "$2")" "$MIGRATE_DEVICE"
}

# rf_port_of NAME: a2 is on p0, b2 on p1, c2 on p2.
rf_port_of() {
    case $1 in a*) echo 0 ;; b*) echo 1 ;; c*) echo 2 ;; esac
}

# migrate_told: the guest comes back with what it has seen.
migrate_told() {
    away_over a2 "$WORKING"
    check "the guest has worked" grep -q '"mode":"udp"' "$LOG/a2.away"
    note "$(grep '"mode":"udp"' "$LOG/a2.away" | jq -rs '"\(map(.lost) | add) of \(map(.sent_packets) | add) datagrams lost"')"
    note "downtime in ms: $(sed -n 's/^migrated .*"downtime":\([0-9]*\).*/\1/p' "$LOG/case.log" | sort -n | paste -sd' ')"
}

# migrate_end: the same, and nothing was refused, and nobody had to be taken out of service.
migrate_end() {
    migrate_told
    local name
    for name in one two; do
        rf_ctl "$name" show --json >"$LOG/$name.json"
        check "no message was refused by $name" jq -e '[.ports[].counters.messages_rejected // 0] | add == 0' "$LOG/$name.json"
        check "no ring broke" jq -e '[.ports[].counters.ring_errors // 0] | add == 0' "$LOG/$name.json"
    done
    vm_off "$HERE_NOW"
    rf_stop one
    rf_stop two
}

migrate_split() {
    MIGRATE_DEVICE=''
    migrate_bed ''
    migrate_round 20 ''
    migrate_end
}

# Linux writes to the pages of its receive buffers itself: to the end of each buffer of MTU size when something has come, and to clear a
# page that it allocates. Such a page is sent in any case, logged or not. It does not write to the large buffers that it posts without
# MRG_RXBUF, if its kernel is told not to clear pages, so this case can find a page that is missing in the log: with a switch that logged no
# buffers at all it failed in one run of two. What finds it for certain are the tests dirty_log.rs of ring and virtio-net.
migrate_packed() {
    MIGRATE_DEVICE=,packed=on,mrg_rxbuf=off
    migrate_bed "$MIGRATE_DEVICE"
    migrate_round 6 "$MIGRATE_DEVICE"
    migrate_end
}

migrate_multiqueue() {
    MIGRATE_DEVICE=''
    export QUEUES=2 WORKERS=2
    migrate_bed ''
    migrate_round 4 ''
    migrate_end
}

# Each vhost port of testpmd has a tap of its own on the bridge. Nothing is compared in the guest's memory here but its own file: this is about the figures.
migrate_dpdk() {
    local i here=a2 to
    netns_add a
    TESTPMD_IN=a testpmd_start pmd "net_vhost0,iface=$RUN/p0,queues=1" net_tap0,iface=rf0 \
        "net_vhost1,iface=$RUN/p1,queues=1" net_tap1,iface=rf1 -- --forward-mode=io --no-lsc-interrupt
    in_ns a ip link add br0 type bridge
    in_ns a ip link set rf0 master br0 up
    in_ns a ip link set rf1 master br0 up
    ns_up a br0 1
    migrate_begins ,csum=off,guest_csum=off
    for ((i = 1; i <= ${MIGRATIONS:-2}; i++)); do
        to=$([ $((i % 2)) = 1 ] && echo b2 || echo a2)
        vm_twin a2 "$to" "$RUN/p$((i % 2))" ,csum=off,guest_csum=off
        vm_migrate "$here" "$to"
        here=$to
        check "the host reaches the guest after migration $i" wait_for 60 in_ns a ping -n -q -c 1 -W 2 10.9.0.2
    done
    migrate_told
    vm_off "$here"
}

migrate_save() {
    local why
    netns_add a
    rf_switch one a "vhost-user:$RUN/p0" tap:rf0
    VM_OPTIONS=$(vm_qmp a2) vm_start a2 "$RUN/p0" ,reconnect=1
    qmp_open a2
    ns_up a rf0 1
    vm_wait a2
    vm_up a2 2
    traffic_server ns:a
    spawn traffic-udp ip netns exec "${PREFIX}a" "$RINGFERRY" traffic server --bind :: --port 7001
    away_serve a
    if why=$(qmp a2 '{"execute":"migrate-set-capabilities","arguments":{"capabilities":[{"capability":"postcopy-ram","state":true}]}}'); then
        note "QEMU takes post-copy as a source"
        qmp a2 '{"execute":"migrate-set-capabilities","arguments":{"capabilities":[{"capability":"postcopy-ram","state":false}]}}'
    else
        note "post-copy: $why"
    fi
    WORKING=$(vm_away a2 "$MIGRATE_WORK")
    sleep 1
    # What libvirt does: it asks whether anything blocks a migration, stops the guest, and has it written.
    check "nothing blocks it" jq -e '."blocked-reasons" == null' <<<"$(qmp a2 '{"execute":"query-migrate"}')"
    qmp a2 '{"execute":"stop"}'
    qmp a2 "{\"execute\":\"migrate\",\"arguments\":{\"uri\":\"exec:cat >$RUN/saved\"}}" || fail "the guest cannot be saved"
    wait_for 30 migration_is a2 completed || fail "the guest is not saved"
    vm_leave a2
    ln -sfn a2.share "$LOG/b2.share"
    VM_OPTIONS="$(vm_qmp b2) -incoming defer" vm_start b2 "$RUN/p0" ,reconnect=1
    qmp_open b2
    why=$(qmp b2 '{"execute":"migrate-set-capabilities","arguments":{"capabilities":[{"capability":"postcopy-ram","state":true}]}}') &&
        fail "QEMU would fetch the guest's memory later, which the port does not offer"
    note "QEMU refuses post-copy: $why"
    qmp b2 "{\"execute\":\"migrate-incoming\",\"arguments\":{\"uri\":\"exec:cat $RUN/saved\"}}" || fail "the guest cannot be restored"
    wait_for 30 migration_is b2 completed || fail "the guest is not restored"
    qmp b2 '{"execute":"cont"}'
    check "the guest is back" wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.2
    away_over a2 "$WORKING"
    vm_off b2
    rf_stop one
}
