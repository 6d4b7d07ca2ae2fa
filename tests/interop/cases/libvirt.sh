# A domain of libvirt's with an interface of type vhostuser, as docs/libvirt.md has it, in a machine with a real systemd, libvirtd and the units of contrib.

case_add libvirt-domain 150 libvirt_case_domain "libvirt starts a domain and counts its packets; the switch is restarted; save and restore; the NIC is unplugged and plugged in" libvirt_fetch
case_add libvirt-migrate 150 libvirt_case_migrate "virsh migrate to another machine and back, under checked traffic" libvirt_fetch

libvirt_case_domain() {
    libvirt_boot m
    libvirt_domain
    ns_up m rf0 1
    sd install -m755 /src/contrib/libvirt/ovs-vsctl /usr/bin/ovs-vsctl
    check "the domain starts" sd virsh create /root/vm0.xml
    note "$(sd virsh version | sed -n 's/^Using library: //p; s/^Running hypervisor: //p' | paste -sd, )"
    libvirt_reachable "after its start"
    check "the interface has the name of the port" sd sh -c 'virsh domiflist vm0 | grep -Eq "^ *vm0 +vhostuser"'
    check "virsh counts as the guest does" libvirt_counts
    check "and so does domstats" sd sh -c 'virsh domstats vm0 --interface | grep -Eq "net.0.tx.pkts=[1-9][0-9]{2}"'
    check "the switch is restarted" sd systemctl restart ringferry
    libvirt_reachable "after a restart of the switch"
    check "the domain is saved" sd virsh save vm0 /root/saved
    check "the port waits" wait_for 5 libvirt_state_is listening
    check "the domain is restored" sd virsh restore /root/saved
    libvirt_reachable "after save and restore"
    check "the NIC is unplugged" sd virsh detach-device vm0 /root/nic.xml --live
    check "the port waits again" wait_for 20 libvirt_state_is listening
    check "the domain has no NIC" test "$(sd virsh domiflist vm0 | grep -c vhostuser)" = 0
    check "the NIC is plugged in" sd virsh attach-device vm0 /root/nic.xml --live
    libvirt_reachable "with a NIC that was plugged in"
    check "nothing was refused" jq -e '[.ports[].counters | .messages_rejected // 0, .ring_errors // 0] | add == 0' <<<"$(sd ringferry ctl show --json)"
    sd virsh destroy vm0
    libvirt_log
}

# libvirt_reachable WHEN: checked traffic with the guest.
libvirt_reachable() {
    wait_for 40 in_ns m ping -n -q -c 1 -W 0.5 10.9.0.2 || { libvirt_log; fail "the guest cannot be reached $1"; }
    traffic_check ns:m 10.9.0.2 1 tcp-both
}

# libvirt_counts: what the guest has received is what the switch has sent, and the other way round. Packets go on meanwhile.
libvirt_counts() {
    local before after virsh side other
    before=$(sd ringferry ctl show vm0 --json)
    virsh=$(sd virsh domifstat vm0 vm0)
    after=$(sd ringferry ctl show vm0 --json)
    echo "$virsh"
    for side in rx:tx tx:rx; do
        other=${side#*:} side=${side%:*}
        for what in packets bytes; do
            awk -v name="${side}_$what" -v least="$(jq ".ports[0].counters.${other}_$what" <<<"$before")" -v most="$(jq ".ports[0].counters.${other}_$what" <<<"$after")" \
                '$2 == name { found = $3 >= least && $3 <= most && $3 > 100 } END { exit !found }' <<<"$virsh" || return 1
        done
    done
}

libvirt_state_is() {
    [ "$(sd ringferry ctl show --json | jq -r '.ports[] | select(.name == "vm0") | .state')" = "$1" ]
}

# Two machines, each with a libvirtd and a switch of its own, on one wire:
#
#   m: guest - ringferry - rf0 - br0 10.9.0.1 - wire ── wire - br0 10.9.0.3 - rf0 - ringferry: n
libvirt_case_migrate() {
    local machine address=1
    for machine in m n; do
        libvirt_boot "$machine"
        # Whoever reaches the port may do as he likes: there is nobody else on this wire.
        echo 'auth_tcp = "none"' >>"$SD_ROOT/etc/libvirt/libvirtd.conf"
        check "libvirtd listens" sd sh -c 'systemctl stop libvirtd && systemctl start libvirtd-tcp.socket libvirtd'
        in_ns "$machine" ip link add br0 type bridge
        in_ns "$machine" ip link set rf0 master br0 up
        ns_up "$machine" br0 $address
        address=$((address + 2))
    done
    in_ns m ip link add wire type veth peer name wire netns "${PREFIX}n"
    for machine in m n; do in_ns "$machine" ip link set wire master br0 up; done
    sd_use m
    libvirt_domain
    check "the domain starts" sd virsh create /root/vm0.xml
    libvirt_reachable "after its start"
    traffic_launch during ns:m 10.9.0.2 12 tcp-both
    memory_flood m 10.9.0.77 52:54:00:00:00:01
    libvirt_migrate m n 3
    libvirt_migrate n m 1
    traffic_join during
    libvirt_reachable "after two migrations"
    sd virsh destroy vm0
    libvirt_log
}

libvirt_memory() {
    memory_of "$SD_ROOT/proc/$(cat "$SD_ROOT/run/libvirt/qemu/vm0.pid")"
}

# libvirt_migrate FROM TO ADDRESS: the domain waits where it arrives until its memory has been compared (memory_compare says why).
libvirt_migrate() {
    local begin from
    sd_use "$1"
    begin=$(now_ms)
    exec {from}<"$(libvirt_memory)"
    check "from $1 to $2" sd virsh migrate --live --suspend --verbose vm0 "qemu+tcp://10.9.0.$3/system" "tcp://10.9.0.$3"
    note "virsh migrate: $(($(now_ms) - begin)) ms"
    check "the port waits for the next" wait_for 5 libvirt_state_is listening
    sd_use "$2"
    memory_compare "/dev/fd/$from" "$(libvirt_memory)"
    exec {from}<&-
    check "the domain goes on there" sd virsh resume vm0
    check "the domain runs there" test "$(sd virsh domstate vm0 | head -n 1)" = running
    check "its port has it" wait_for 5 libvirt_state_is up
    check "the host reaches it" wait_for 60 in_ns m ping -n -q -c 1 -W 2 10.9.0.2
}
