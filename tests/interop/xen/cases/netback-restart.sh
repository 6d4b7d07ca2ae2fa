# about: our netback is killed and started again under the kernel's netfront, which does not notice: a connection lives on
# limit: 500
netback_start
domu_create d1 "mac=00:16:3e:00:00:01,script=/bin/true"
id=$(domu_id d1)
domu d1 20 "ip addr add 10.9.0.2/24 dev eth0 && ip link set eth0 up" || fail "d1 has no network device"
check "first ping" wait_for 30 ping -n -q -c 1 -W 1 10.9.0.2
domu_servers d1

# A connection outlives the switch, whose end is sudden.
ringferry traffic client --to 10.9.0.2 --seconds 6 --mode tcp >/tmp/survivor 2>&1 &
survivor=$!
sleep 2
netback_end KILL
netback_start
wait $survivor || fail "a connection did not outlive the restart: $(tail -n 1 /tmp/survivor)"
cat /tmp/survivor
netback_end KILL "$id"
netback_start
check "ping after another restart" wait_for 20 ping -n -q -c 1 -W 1 10.9.0.2
traffic 10.9.0.2 tcp-reverse
check "the front end did not notice" domu d1 10 "! dmesg | grep -e 'still in use' -e 'isabled for further use'"

domu_destroy d1
domu_gone d1
netback_end TERM
check "the log" sh -c '! grep -e ERROR -e panicked /share/netback.log'
