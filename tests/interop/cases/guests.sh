# Two `ringferry guest` around a switch, kernels at the ends: our own two halves as programs, with each kind of ring.
#
#   namespace a: tap - ringferry guest - switch - ringferry guest - tap: namespace b

case_add guests-restart 150 guests_restart "the switch is killed under checked TCP: the streams go on, with split, packed and in-order rings"

guests_restart() {
    local ring in_order before killed gap
    netns_add a b s
    for ring in split packed; do
        for in_order in off on; do
            echo "== rings: $ring, in order: $in_order"
            guests_switch
            rf_start guest-a a guest --socket "$RUN/a.sock" --tap rf0 --address 10.9.0.1/24 --ring "$ring" --in-order "$in_order"
            rf_start guest-b b guest --socket "$RUN/b.sock" --tap rf0 --address 10.9.0.2/24 --ring "$ring" --in-order "$in_order"
            wait_for 5 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no path within 5 s"
            guests_agreed "$ring" "$in_order"
            traffic_server ns:b
            before=$(rf_fd_count guest-a)
            traffic_launch during ns:a 10.9.0.2 4 tcp-both
            sleep 1
            killed=$(now_ms)
            kill_hard switch
            guests_switch
            wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no traffic within 10 s of the restart"
            gap=$(($(now_ms) - killed))
            note "$ring, in order $in_order: $gap ms after SIGKILL"
            guests_agreed "$ring" "$in_order"
            traffic_join during
            traffic_check ns:a 10.9.0.2 1 udp
            [ "$(rf_fd_count guest-a)" = "$before" ] || fail "ringferry guest had $before file descriptors before and has $(rf_fd_count guest-a) after"
            stop traffic-b
            rf_stop guest-a
            rf_stop guest-b
            rf_stop switch
        done
    done
}

guests_switch() {
    rf_switch switch s "vhost-user:$RUN/a.sock" "vhost-user:$RUN/b.sock"
}

guests_agreed() {
    local packed=RING_PACKED order=IN_ORDER port
    [ "$1" = packed ] || packed=-RING_PACKED
    [ "$2" = on ] || order=-IN_ORDER
    for port in a b; do rf_has_features switch "$port" "$packed" "$order"; done
}
