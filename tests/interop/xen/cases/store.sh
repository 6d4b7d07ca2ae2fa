# about: our client of the store: xenstored through the kernel and through its socket, in dom0 and in a domU
# limit: 200
check "dom0, through the kernel" xen-check store /tool
check "dom0, through the socket" xen-check store /tool /run/xenstored/socket
domu_create d1 "" nonet=1
check "d1, relative" domu d1 60 'xen-check store data'
check "d1, absolute" domu d1 60 "xen-check store /local/domain/$(domu_id d1)/data"
note "$(grep -c '^ok: ' /share/case.log) properties"
domu_destroy d1
