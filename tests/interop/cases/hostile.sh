# Peers that crash, hang up and send garbage. The process lives, no file descriptor leaks, and the other ports' traffic does not stop.
#
#   namespace a: tap - switch - vhost-user (good.sock) - ringferry guest - tap: namespace b        and bad.sock for the attackers

case_add hostile-connections 90 hostile_connections "50 connections that come and go, with garbage and malformed messages"
case_add hostile-crash 90 hostile_crash "drivers killed with SIGKILL in the middle of traffic"

hostile_bed() {
    netns_add a b
    rf_switch switch a tap:rf0 "vhost-user:$RUN/good.sock" "vhost-user:$RUN/bad.sock"
    rf_start guest-b b guest --socket "$RUN/good.sock" --tap rf0
    ns_up a rf0 1
    ns_up b rf0 2
    wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no path within 10 s"
    traffic_server ns:b
    FD_BEFORE=$(rf_fd_count switch)
    # The good port's traffic, checked, during all of it.
    spawn good ip netns exec "${PREFIX}a" "$RINGFERRY" traffic client --to 10.9.0.2 --port 7000 --mode tcp-both --seconds 8
}

hostile_end() {
    local status=0
    alive switch || fail "the switch ended: $(tail -n 1 "$LOG/switch.log")"
    wait_for 30 not_running "${PID[good]}" || fail "the good port's traffic did not end"
    wait "${PID[good]}" || status=$?
    unset 'PID[good]'
    [ $status = 0 ] || fail "the good port's traffic failed: $(tail -n 1 "$LOG/good.log")"
    # Disconnects are noticed at once, but by another thread than ours.
    wait_for 5 hostile_fds_back || fail "the switch had $FD_BEFORE file descriptors before and has $(rf_fd_count switch) after"
    traffic_check ns:a 10.9.0.2 1 tcp-both
    # The attacked port still serves an honest driver.
    netns_add c
    rf_start guest-c c guest --socket "$RUN/bad.sock" --tap rf0
    ns_up c rf0 3
    wait_for 10 in_ns c ping -n -q -c 1 -W 1 10.9.0.2 || fail "the attacked port serves no one any more"
    traffic_one ns:c 10.9.0.2 1 tcp-both
    rf_stop guest-c
    rf_stop guest-b
    rf_stop switch
}

hostile_fds_back() {
    [ "$(rf_fd_count switch)" = "$FD_BEFORE" ]
}

# message REQUEST FLAGS SIZE [BODY]: a vhost-user message in printf's notation, header fields little endian.
message() {
    local word
    for word in "$1" "$2" "$3"; do
        printf '\\x%02x\\x%02x\\x%02x\\x%02x' $((word & 255)) $((word >> 8 & 255)) $((word >> 16 & 255)) $((word >> 24 & 255))
    done
    printf '%s' "${4:-}"
}

# throw BYTES: connects, sends, hangs up. BYTES in printf's notation.
throw() {
    # shellcheck disable=SC2059 # the format is the data
    printf "$1" | timeout 2 socat -t 0.02 - "UNIX-CONNECT:$RUN/bad.sock" >/dev/null || true
}

hostile_connections() {
    hostile_bed
    local round ones zeros
    ones=$(printf '\\xff%.0s' {1..40})
    zeros=$(printf '\\x00%.0s' {1..40})
    for round in {1..5}; do
        throw ''                                    # connect and go
        throw "$(message 1 1 0)"                    # GET_FEATURES, answer not waited for
        throw '\x01\x00'                            # a part of a header
        throw "$(message 1 1 0xffffffff)"           # a size no message has
        throw "$(message 0xffffffff 1 8 "$ones")"   # an unknown request
        throw "$(message 5 1 40 "$ones")"           # SET_MEM_TABLE: 2^32-1 regions, and no descriptor
        throw "$(message 5 1 40 "\\x01\\x00\\x00\\x00$zeros")"  # SET_MEM_TABLE: one region without a descriptor
        throw "$(message 3 1 0)$(message 9 1 40 "$ones")"       # SET_OWNER, SET_VRING_ADDR of ring 2^32-1, addresses outside everything
        throw "$(message 3 1 0)$(message 8 1 8 "$ones")$(message 18 1 8 "$ones")"   # SET_VRING_NUM, SET_VRING_ENABLE
        head -c 4096 /dev/urandom | timeout 2 socat -t 0.02 - "UNIX-CONNECT:$RUN/bad.sock" >/dev/null || true
        alive switch || fail "the switch ended in round $round: $(tail -n 1 "$LOG/switch.log")"
    done
    hostile_end
}

hostile_crash() {
    hostile_bed
    local round
    for round in 1 2 3; do
        # It answers the pings below, so that both of its rings are busy when it dies.
        testpmd_start testpmd "net_virtio_user0,path=$RUN/bad.sock,mrg_rxbuf=1" -- --forward-mode=icmpecho
        spawn flood ip netns exec "${PREFIX}a" ping -n -q -f -c 100000 10.9.0.77
        wait_for 5 in_ns a ping -n -q -c 1 -W 1 10.9.0.77 || fail "testpmd does not answer in round $round"
        sleep 0.3
        kill_hard testpmd
        kill_hard flood
        alive switch || fail "the switch ended in round $round: $(tail -n 1 "$LOG/switch.log")"
    done
    hostile_end
}
