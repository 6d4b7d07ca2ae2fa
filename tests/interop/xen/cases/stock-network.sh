# about: the bed itself: the kernel's netback and netfront, ping and TCP both ways
# limit: 200
modprobe xen-netback
ip link add xenbr0 type bridge
ip addr add 10.9.0.1/24 dev xenbr0
ip link set xenbr0 up
domu_create d1 "mac=00:16:3e:00:00:01,bridge=xenbr0,script=vif"
domu d1 20 "ip addr add 10.9.0.2/24 dev eth0 && ip link set eth0 up" || fail "d1 has no network device"
check "first ping" wait_for 30 ping -n -q -c 1 -W 1 10.9.0.2
check "ping" ping -n -q -i 0.1 -c 20 -s 1400 -p a5 10.9.0.2
domu_start d1 iperf3 -s
for way in "" -R; do
    check "TCP $way" timeout 30 iperf3 -c 10.9.0.2 -t 2 $way
done
in_use=$(grants_in_use "$(domu_id d1)")
[ "$in_use" -ge 2 ] || fail "the rings of d1 are mapped, and Xen counts $in_use pages"
domu_destroy d1
check "nothing keeps d1 alive" wait_for 10 sh -c '! xl list | grep -q -e "^d1 " -e null'
