# about: our netback in dom0 serves the kernel's netfront: two queues, every byte checked, checksums, unplugged, domU made anew
# limit: 600
netback_start ,queues=2 --workers 2
boot_guest() {
    VCPUS=2 domu_create d1 "mac=00:16:3e:00:00:01,script=/bin/true"
    id=$(domu_id d1)
    domu d1 20 "ip addr add 10.9.0.2/24 dev eth0 && ip link set eth0 up" || fail "d1 has no network device"
    check "first ping" wait_for 30 ping -n -q -c 1 -W 1 10.9.0.2
    domu_servers d1
}
boot_guest
[ "$(xenstore-read "/local/domain/$id/device/vif/0/multi-queue-num-queues")" = 2 ] || fail "the front end has not two queues"
check "large pings" ping -n -q -i 0.1 -c 20 -s 8000 -p a5 10.9.0.2

for way in "" -R; do
    check "TCP $way" timeout 30 iperf3 -c 10.9.0.2 -t 2 -P 4 $way
done
traffic 10.9.0.2 tcp tcp-reverse
RATE=20M traffic 10.9.0.2 udp
traffic 10.9.0.2 rr
for queue in 0 1; do
    for what in rx tx; do
        [ "$(counter "xen$id.0" "${what}_queue_${queue}_packets")" -gt 100 ] || fail "queue $queue of d1 is hardly used ($what)"
    done
done
ringferry ctl --control /tmp/netback.sock stats "xen$id.0" --queues

# Checksums that the sender has computed, and packets that nobody segments for it.
check "without offloads in d1" domu d1 10 "ethtool -K eth0 tx off tso off gso off sg off"
check "without offloads in dom0" ethtool -K rf0 tx off tso off gso off
traffic 10.9.0.2 tcp-both
check "with offloads again" domu d1 10 "ethtool -K eth0 tx on sg on gso on tso on"
check "with offloads again" ethtool -K rf0 tx on tso on gso on
check "checksums in dom0" no-bad-checksums
check "checksums in d1" domu d1 10 no-bad-checksums

check "unplug" xl network-detach d1 0
wait_for 10 sh -c "! ringferry ctl --control /tmp/netback.sock stats xen$id.0" || fail "the port stays"
[ "$(grants_in_use "$id")" = 0 ] || fail "$(grants_in_use "$id") pages of d1 are still mapped"
domu_destroy d1
domu_gone d1

boot_guest
traffic 10.9.0.2 tcp-reverse
domu_destroy d1
domu_gone d1
netback_end TERM
check "the log" sh -c '! grep -e ERROR -e panicked /share/netback.log'
