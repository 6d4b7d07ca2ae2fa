# about: `real` between two domains: a domU grants, dom0 maps and copies, both send events; a killed end leaves nothing
# limit: 300
domu_create d1 "" nonet=1
id=$(domu_id d1)
domu_start d1 xen-check front 0
check "dom0 uses what d1 grants" xen-check back "$id"
domu d1 10 'cat /tmp/background; grep -q "^ok" /tmp/background' || fail "the front end failed"
[ "$(grants_in_use "$id")" = 0 ] || fail "$(grants_in_use "$id") pages of d1 are still mapped"
note "$(sed -n 's/^note: ForeignCounters//p' /share/case.log)"

# The back end is killed: the kernel unmaps what it had.
xenstore-rm "/local/domain/$id/data/check"
domu_start d1 xen-check front 0
xen-check hold "$id" >/tmp/hold 2>&1 &
holder=$!
check "dom0 holds pages of d1" wait_for 30 grep -q '^ok' /tmp/hold
[ "$(grants_in_use "$id")" = 64 ] || fail "64 pages are mapped, and Xen counts $(grants_in_use "$id")"
kill -KILL $holder
wait $holder || true
[ "$(grants_in_use "$id")" = 0 ] || fail "after the back end was killed, $(grants_in_use "$id") pages are still mapped"

# The front end is killed while its pages are mapped: they stay what they are, and go when the back end lets go (XSA-396).
xen-check hold "$id" >/tmp/hold 2>&1 &
holder=$!
check "dom0 holds pages of d1 again" wait_for 30 grep -q '^ok' /tmp/hold
check "the front end is killed" domu d1 10 'kill -KILL $(cat /tmp/background.pid) $(pidof xen-check) 2>/dev/null; ! pidof xen-check'
[ "$(grants_in_use "$id")" = 64 ] || fail "64 pages are mapped, and Xen counts $(grants_in_use "$id")"
kill -KILL $holder
wait $holder || true
[ "$(grants_in_use "$id")" = 0 ] || fail "$(grants_in_use "$id") pages are still mapped"
check "the kernel frees them, and all can be granted again" domu d1 60 'xen-check limit'

domu_destroy d1
check "nothing keeps d1 alive" wait_for 10 sh -c '! xl list | grep -q -e "^d1 " -e null'
