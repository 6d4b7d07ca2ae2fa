# A running switch is replaced by another process (`ringferry run --replace`): a stock guest and the host's kernel on a tap notice nothing.

case_add replace-split 150 replace_split "the switch is replaced again and again under checked TCP and numbered datagrams both ways: none is lost, no link goes down"
case_add replace-packed 150 replace_packed "packed rings: the same, of which QEMU could tell no restarted switch where they stood"
case_add replace-pairs 180 replace_pairs "two pairs on two workers: the same"
case_add replace-migrate 150 replace_migrate "the switch is replaced while a guest is migrated, its writes being logged"

case_add replace-guest 60 replace_guest "ringferry guest and the host's kernel, 25000 datagrams a second each way at once: the same"

# Replacements under each kind of traffic.
REPLACEMENTS=5

# replace_bed DEVICE_OPTIONS: switch with a tap at .1 in namespace a, guest vm2 at .2, and a traffic server at either end.
replace_bed() {
    netns_add a
    rf_switch switch a "vhost-user:$RUN/vm2.sock" tap:rf0
    vm_start vm2 "$RUN/vm2.sock" ,reconnect=1 "$1"
    ns_up a rf0 1
    vm_wait vm2
    vm_up vm2 2
    traffic_server ns:a
    traffic_server vm:vm2
}

# What says in the guest and on the host that a link has been down.
replace_links() {
    guest vm2 5 'cat /sys/class/net/eth0/carrier_changes'
    in_ns a cat /sys/class/net/rf0/carrier_changes
}

# replace_under CLIENT ADDRESS MODE: replaces the switch while traffic flows.
replace_under() {
    local i
    # At a rate that the emulated guest takes, so that whatever is lost was lost by the switch.
    UDP_RATE=2000000 traffic_launch during "$1" "$2" 3 "$3"
    sleep 0.5
    for ((i = 0; i < REPLACEMENTS; i++)); do rf_replace switch a; done
    alive during || fail "the traffic was over before the last replacement"
    traffic_join during
    [ "$3" != udp ] || check "no datagram was lost, doubled or overtaken" jq -es 'last | .lost == 0 and .duplicated == 0 and .reordered == 0' "$LOG/during.log"
    mv "$LOG/during.log" "$LOG/during.$3.${1%%:*}"
}

replace_all() {
    local before
    before=$(replace_links)
    replace_under ns:a 10.9.0.2 udp
    replace_under vm:vm2 10.9.0.1 udp
    replace_under vm:vm2 10.9.0.1 tcp-both
    [ "$(replace_links)" = "$before" ] || fail "a link has been down"
    rf_ctl switch show --json >"$LOG/switch.json"
    check "its front end has connected once" jq -e '.ports[] | select(.name == "vm2") | .counters.connections == 1' "$LOG/switch.json"
    check "no ring broke" jq -e '[.ports[].counters.ring_errors // 0] | add == 0' "$LOG/switch.json"
    note "packets waited for, in microseconds: $(grep -o 'microseconds=[0-9]*' "$LOG/switch.log" | cut -d= -f2 | sort -n | paste -sd' ')"
    vm_off vm2
    rf_stop switch
}

replace_split() {
    replace_bed ''
    replace_all
}

replace_packed() {
    replace_bed ,packed=on
    rf_has_features switch vm2 RING_PACKED
    replace_all
}

replace_pairs() {
    WORKERS=2 QUEUES=2 replace_bed ''
    guest vm2 5 'ethtool -L eth0 combined 2' || fail "the guest does not use two pairs"
    replace_all
}

# At a rate that no emulated guest takes, and both ways at once: some hundred datagrams wait during each replacement. Queues and ring hold what comes in a third of a second, as
# whoever reads them may wait for a processor that long where other cases run beside this one.
replace_guest() {
    local i way
    netns_add a b
    rf_switch switch a "vhost-user:$RUN/vm0.sock" tap:rf0
    rf_start vm0 b guest --socket "$RUN/vm0.sock" --tap rf0 --address 10.9.0.2/24 --queue-size 8192
    ns_up a rf0 1
    in_ns a ip link set rf0 txqueuelen 8192
    in_ns b ip link set rf0 txqueuelen 8192
    traffic_server ns:a
    traffic_server ns:b
    UDP_RATE=40000000 UDP_SIZE=200 traffic_launch to-guest ns:a 10.9.0.2 10 udp
    UDP_RATE=40000000 UDP_SIZE=200 traffic_launch to-host ns:b 10.9.0.1 10 udp
    sleep 0.5
    for ((i = 0; i < 4 * REPLACEMENTS; i++)); do rf_replace switch a; done
    alive to-guest && alive to-host || fail "the traffic was over before the last replacement"
    traffic_join to-guest
    traffic_join to-host
    replace_counted
    for way in to-guest to-host; do
        check "no datagram $way was lost, doubled or overtaken" jq -es 'last | .lost == 0 and .duplicated == 0 and .reordered == 0' "$LOG/$way.log"
    done
    rf_stop switch
}

# Every place where a datagram can be lost, for whoever reads the log of a failure: the taps' queues, the switch, and the receivers' sockets.
replace_counted() {
    local end
    for end in a b; do
        in_ns "$end" ip -s link show rf0
        in_ns "$end" nstat -asz UdpInErrors UdpRcvbufErrors UdpInCsumErrors
    done
    rf_ctl switch show
}

# The log of the guest's memory goes along, so no packet that a successor writes is missing at the other end.
replace_migrate() {
    local i
    migrate_bed ''
    vm_twin a2 b2 "$RUN/p1"
    # Slow enough for what happens meanwhile.
    qmp a2 '{"execute":"migrate-set-parameters","arguments":{"max-bandwidth":4194304}}'
    qmp a2 "{\"execute\":\"migrate\",\"arguments\":{\"uri\":\"unix:$RUN/b2.incoming\"}}" || fail "a2 cannot be migrated"
    wait_for 10 migration_is a2 active || fail "the migration does not begin"
    check "writes are logged" wait_for 10 grep -q "are logged now" "$LOG/one.log"
    for ((i = 0; i < REPLACEMENTS; i++)); do rf_replace one a; done
    in_ns a ping -n -q -c 3 -i 0.1 -W 1 10.9.0.2 || fail "no traffic during the migration"
    migration_is a2 active || fail "the migration was over before the last replacement"
    qmp a2 '{"execute":"migrate-set-parameters","arguments":{"max-bandwidth":1073741824}}'
    vm_arrive a2 b2
    HERE_NOW=b2
    check "the host reaches the guest after the migration" wait_for 5 in_ns a ping -n -q -c 1 -W 0.2 10.9.0.2
    rf_replace one a
    migrate_end
}
