# about: front ends in dom0 that break their rings, next to a stock guest whose traffic goes on; nothing of theirs stays mapped
# limit: 500
netback_start ,class=rfvif --port xen-vif:xen,name=stock
domu_create d1 "mac=00:16:3e:00:00:01,script=/bin/true"
domu d1 20 "ip addr add 10.9.0.2/24 dev eth0 && ip link set eth0 up" || fail "d1 has no network device"
check "first ping" wait_for 30 ping -n -q -c 1 -W 1 10.9.0.2
domu_servers d1
attacks=0
for attack in producer slots endless beyond extras kind grants; do
    vif_create rfvif 0
    check "$attack" timeout 90 xen-check hostile rfvif "$attack"
    attacks=$((attacks + 1))
    said=$(grep -c 'is disconnected: ' /share/netback.log)
    [ "$said" = "$attacks" ] || fail "$attack: $said front ends in place of $attacks were disconnected"
    [ "$(grants_in_use 0)" = 0 ] || fail "$attack: $(grants_in_use 0) pages of dom0 are still mapped"
    vif_remove rfvif 0
    traffic 10.9.0.2 tcp
done
note "$attacks attacks"
check "the stock guest did not notice" domu d1 10 "! dmesg | grep -e 'still in use' -e 'isabled for further use'"
domu_destroy d1
domu_gone d1
netback_end TERM
check "the log" sh -c '! grep -e ERROR -e panicked /share/netback.log'
