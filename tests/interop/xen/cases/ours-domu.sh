# about: our netfront in a domU on our netback in dom0, pages kept mapped and not: hits are counted, and no page stays mapped or granted
# limit: 600
netback_start ,class=rfvif
domu_create d1 "" nonet=1
id=$(domu_id d1)
check "modules" domu d1 10 'modprobe tun'
domu_servers d1
for mode in "" --no-static-grants "--no-static-grants --no-persistent"; do
    vif_create rfvif "$id"
    domu_netfront d1 "--class rfvif $mode"
    traffic 10.9.0.2 tcp-both
    ringferry ctl --control /tmp/netback.sock stats "xen$id.0" --queues
    hits=$(counter "xen$id.0" grant_hits)
    mapped=$(grants_in_use "$id")
    case $mode in
    *--no-persistent*) [ "$hits" = 0 ] && [ "$mapped" -lt 10 ] ;;
    # How many hits there are depends on what an emulated machine carries in the time.
    *) [ "$hits" -gt 100 ] && [ "$mapped" -gt 100 ] ;;
    esac || fail "$hits hits and $mapped pages mapped with netfront ${mode:-as it is}"
    note "${mode:-static grants}: $mapped pages mapped, $hits hits, $(counter "xen$id.0" grant_copies) copies by Xen for $(counter "xen$id.0" rx_packets) + $(counter "xen$id.0" tx_packets) packets"
    domu_netfront_end d1
    vif_remove rfvif "$id"
done
# All but 44 pages were granted, each time: what was left behind would be missing.
check "all can be granted again" domu d1 60 'xen-check limit'
domu_destroy d1
domu_gone d1
netback_end TERM
check "the log" sh -c '! grep -e ERROR -e panicked /share/netback.log'
