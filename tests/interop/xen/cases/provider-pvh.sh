# about: `real` in a PVH domU, whose kernel grants and maps in another way: as the one who grants, and as the one who maps
# limit: 600
TYPE=pvh domu_create d1 "" nonet=1
id=$(domu_id d1)
domu_start d1 xen-check front 0
check "dom0 uses what a PVH domain grants" xen-check back "$id"
domu d1 10 'cat /tmp/background; grep -q "^ok" /tmp/background' || fail "the front end failed"
[ "$(grants_in_use "$id")" = 0 ] || fail "$(grants_in_use "$id") pages of d1 are still mapped"
check "its own grants are refused, as Xen would take the pages away" domu d1 30 'xen-check self 2>&1 | grep -q "cannot use grants of its own"'

node=/local/domain/0/data/check
xenstore-write "$node" ""
xenstore-chmod "$node" n0 "b$id"
xen-check front "$id" >/tmp/front 2>&1 &
front=$!
domu_start d1 xen-check hold 0
check "a PVH domain maps what dom0 grants" wait_for 60 domu d1 10 'grep -q "^ok: 64 pages" /tmp/background'
[ "$(grants_in_use 0)" = 64 ] || fail "64 pages are mapped, and Xen counts $(grants_in_use 0)"
domu d1 10 'killall -KILL xen-check'
check "they are unmapped when it is killed" wait_for 10 sh -c '. /lib/case.sh; [ "$(grants_in_use 0)" = 0 ]'
check "page by page, it maps them as well" domu d1 120 'xen-check each 0 2>&1'
note "$(sed -n 's/^ok: \(.* pages mapped one by one.*\)/\1/p' /share/case.log)"
[ "$(grants_in_use 0)" = 0 ] || fail "$(grants_in_use 0) pages of dom0 are still mapped"
kill -KILL $front
domu_destroy d1
check "nothing keeps d1 alive" wait_for 10 sh -c '! xl list | grep -q -e "^d1 " -e null'
