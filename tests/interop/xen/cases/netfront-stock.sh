# about: our netfront in a domU's user space on the kernel's netback in dom0: every byte checked both ways, closed, killed, opened again
# limit: 500
modprobe xen-netback
ip link add xenbr0 type bridge
ip addr add 10.9.0.1/24 dev xenbr0
ip link set xenbr0 up
domu_create d1 "mac=00:16:3e:00:00:01,bridge=xenbr0,script=vif" nonet=1
id=$(domu_id d1)
check "modules" domu d1 10 'modprobe tun'
domu_servers d1

domu_netfront d1
check "large pings" ping -n -q -i 0.1 -c 20 -s 8000 -p a5 10.9.0.2
for way in "" -R; do
    check "TCP $way" timeout 30 iperf3 -c 10.9.0.2 -t 2 $way
done
traffic 10.9.0.2 tcp tcp-reverse
RATE=20M traffic 10.9.0.2 udp
traffic 10.9.0.2 rr
ethtool -S "vif$id.0"
domu_netfront_end d1
check "the back end has closed" wait_for 5 sh -c "[ \$(xenstore-read /local/domain/0/backend/vif/$id/0/state) -ge 5 ]"

# Its end is sudden; the next takes the interface over.
domu_netfront d1 --no-offloads
traffic 10.9.0.2 tcp-both
domu d1 10 'kill -KILL $(cat /tmp/background.pid)'
domu_netfront d1 --no-split-events
traffic 10.9.0.2 tcp-both
domu_netfront_end d1
check "checksums in dom0" no-bad-checksums
check "checksums in d1" domu d1 10 no-bad-checksums
domu_destroy d1
domu_gone d1
