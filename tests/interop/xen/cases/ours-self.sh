# about: domain 0 grants to itself: our netfront and our netback in dom0, two queues, killed in turn; the fast loop
# limit: 400
echo 4096 >/sys/module/xen_gntalloc/parameters/limit
vif_create rfvif 0
netback_start ,class=rfvif,queues=2 --workers 2
ip netns add guest
front_start() {
    ip netns exec guest ringferry netfront --tap xn0 --class rfvif --queues 2 --address 10.9.0.2/24 --json >/tmp/front 2>>/share/front.log &
    front=$!
    check "first ping" wait_for 40 ping -n -q -c 1 -W 1 10.9.0.2
}
front_start
ip netns exec guest ringferry traffic server >/share/server.log 2>&1 &
traffic 10.9.0.2 tcp tcp-reverse
RATE=20M traffic 10.9.0.2 udp
ringferry ctl --control /tmp/netback.sock stats xen0.0 --queues
[ "$(counter xen0.0 grant_hits)" -gt 1000 ] || fail "only $(counter xen0.0 grant_hits) hits"
[ "$(grants_in_use 0)" -gt 500 ] || fail "only $(grants_in_use 0) pages are mapped"
note "$(counter xen0.0 grant_hits) hits, $(counter xen0.0 grant_misses) misses, $(counter xen0.0 grant_copies) copies by Xen"

step "netback is killed"
netback_end KILL 0
netback_start ,class=rfvif,queues=2 --workers 2
check "ping after the restart of netback" wait_for 20 ping -n -q -c 1 -W 1 10.9.0.2
traffic 10.9.0.2 tcp-both
[ "$(counter xen0.0 grant_hits)" -gt 100 ] || fail "only $(counter xen0.0 grant_hits) hits after the restart"
[ "$(grants_in_use 0)" -gt 500 ] || fail "after the restart only $(grants_in_use 0) pages are mapped"

step "netfront is killed"
kill -KILL $front
wait $front || true
front_start
traffic 10.9.0.2 tcp-both

step "netfront ends"
kill -TERM $front
wait $front || fail "our netfront ended with $?"
cat /tmp/front
grep -q '"left_mapped": 0' /tmp/front || fail "pages stay mapped"
[ "$(grants_in_use 0)" = 0 ] || fail "$(grants_in_use 0) pages of dom0 are still mapped"
check "all can be granted again" xen-check limit
vif_remove rfvif 0
netback_end TERM 0
check "the log" sh -c '! grep -e ERROR -e panicked /share/netback.log'
