# about: every property of a provider, of `real`: dom0 grants to itself, and a PV domU to itself
# limit: 200
check "the provider's properties" xen-check self
check "the limit of grants" xen-check limit
# What was not ended or unmapped would be in use still.
[ "$(grants_in_use 0)" = 0 ] || fail "$(grants_in_use 0) pages of dom0 are still mapped"
domu_create d1 "" nonet=1
check "the provider's properties in a domU" domu d1 60 'xen-check self'
[ "$(grants_in_use "$(domu_id d1)")" = 0 ] || fail "$(grants_in_use "$(domu_id d1)") pages of d1 are still mapped"
domu_destroy d1
note "$(grep -c '^ok: ' /share/case.log) properties"
