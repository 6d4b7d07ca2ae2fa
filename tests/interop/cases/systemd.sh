# contrib's units under a real systemd: what docs/operating.md says is typed in, and then the service lives through what services do.
#
#   namespace a: tap rf0 - ringferry guest - vm0.sock ┐ (systemd's)
#                                                     ├ ringferry.service - tap rf0: namespace m, which is the machine's
#                                            vm1.sock ┘

case_add systemd-bookworm 150 systemd_bookworm "units under systemd 252: install as documented, reload, upgrade, crash, restart, stop, start by a front end" systemd_tree bookworm
case_add systemd-trixie 150 systemd_trixie "the same under systemd 257" systemd_tree trixie

systemd_bookworm() {
    systemd_service bookworm
}

systemd_trixie() {
    systemd_service trixie
}

systemd_service() {
    systemd_boot "$1"
    note "$(sd systemctl --version | head -n 1)"
    check "it is installed as docs/operating.md says" sd_install
    sd_confined
    sd_guest
    sd_reloads
    sd_upgraded
    sd_survives
    sd_not_upgraded
    sd_comes_back
    sd_stops
    check "the journal has plain text" sd sh -c 'journalctl -o cat -u ringferry >/tmp/journal && ! grep "[[:cntrl:]]" /tmp/journal'
    rf_stop vm0
}

# The unit says nothing that this systemd does not know, but for the type that it has a second line for, and nothing that the switch or its own sandbox cannot bear.
sd_confined() {
    local complaints
    complaints=$(sd systemd-analyze verify ringferry.service ringferry-vm@vm0.socket 2>&1 | grep -v 'Failed to parse service type, ignoring: notify-reload' || true)
    [ "$complaints" = '' ] || fail "systemd does not like the units: $complaints"
    [ "$(sd stat -c '%U:%G %a' /run/ringferry/vm0.sock)" = 'root:kvm 660' ] || fail "owner of the socket: $(sd ls -l /run/ringferry)"
    [ "$(sd stat -c '%U %a' /run/ringferry/control.sock)" = 'ringferry 600' ] || fail "owner of the control socket: $(sd ls -l /run/ringferry)"
    local status
    status=$(sd cat "/proc/$(sd_property ringferry MainPID)/status")
    for line in 'CapEff:.0000000000000000' 'NoNewPrivs:.1' 'Seccomp:.2'; do
        grep -qx "$line" <<<"$status" || fail "the switch has more rights than it should: no $line"
    done
    check "its own sandbox" sd_said 'in a sandbox'
    sd systemctl status ringferry
}

# sd_said TEXT: since the service was started last.
sd_said() {
    sd journalctl -o cat "_SYSTEMD_INVOCATION_ID=$(sd_property ringferry InvocationID)" | grep -e "$1"
}

# A port more, and a mistake in the file: the guest that is there notices neither.
sd_reloads() {
    local process file=$SD_ROOT/etc/ringferry/ringferry.toml
    process=$(sd_property ringferry MainPID)
    traffic_launch reload ns:a 10.9.0.1 2 tcp-both
    printf '[[port]]\nname = "vm2"\nkind = "vhost-user"\nsocket = "/run/ringferry/vm2.sock"\n' >>"$file"
    check "a port is added by a reload" sd systemctl reload ringferry
    check "the port is there" sd test -S /run/ringferry/vm2.sock
    cp "$file" "$RUN/good.toml"
    echo 'kind = "submarine"' >>"$file"
    ! sd systemctl reload ringferry || fail "a reload with a mistake in the file succeeds"
    check "the mistake is in the status" sd sh -c 'systemctl status ringferry | grep "the switch refuses: .*ringferry.toml:"'
    cat "$RUN/good.toml" >"$file"
    [ "$(sd_property ringferry ActiveState) $(sd_property ringferry MainPID)" = "active $process" ] || fail "the service did not survive the mistake"
    traffic_join reload
    # systemd keeps the tap, too, and lets go of it when it is told: with other settings and back.
    sed 's/^tap = .*/&\noffloads = false/' "$RUN/good.toml" >"$file"
    check "a tap is opened anew by a reload" sd systemctl reload ringferry
    cat "$RUN/good.toml" >"$file"
    check "and back" sd systemctl reload ringferry
    check "the tap is up" jq -e '.ports[] | select(.name == "rf0").state == "up"' <<<"$(sd ringferry ctl show --json)"
    # The configuration file is the user's, and so is its directory: what `ctl` changes is kept.
    check "a rule is kept in the file" jq -e .persistent <<<"$(sd ringferry ctl set vm0 rate_in=10gbit --json)"
}

# sd_under NAME: numbered datagrams from the guest for three seconds, in the background, of which the first have come when this returns.
sd_under() {
    UDP_RATE=10000000 traffic_launch "$1" ns:a 10.9.0.1 3 udp
    sleep 0.5
}

# sd_link: how often the guest has connected, and its link was down.
sd_link() {
    echo "$(grep -cE 'the back end (has disconnected|says|broke|cannot)' "$LOG/vm0.log" || true) $(in_ns a cat /sys/class/net/rf0/carrier_changes)"
}

# The program is another file now: a reload has it take over, and the guest loses nothing. Another reload finds nothing newer.
sd_upgraded() {
    local process link
    process=$(sd_property ringferry MainPID) link=$(sd_link)
    install -m 755 "$RINGFERRY" "$SD_ROOT/usr/bin/ringferry"
    sd_under upgrade
    check "a reload after an upgrade" sd systemctl reload ringferry
    check "the new program runs" sd_is_another "$process"
    check "it has the program's name" sd grep -qx ringferry "/proc/$(sd_property ringferry MainPID)/comm"
    check "it executes the new file" test "$(sd stat -Lc %i "/proc/$(sd_property ringferry MainPID)/exe")" = "$(sd stat -c %i /usr/bin/ringferry)"
    process=$(sd_property ringferry MainPID)
    check "a reload without an upgrade" sd systemctl reload ringferry
    [ "$(sd_property ringferry MainPID)" = "$process" ] || fail "a program is replaced by itself"
    [ "$(sd_property ringferry NRestarts)" = 0 ] || fail "a replacement counts as a restart"
    check "one switch, one helper" test "$(sd sh -c 'cat /sys/fs/cgroup/system.slice/ringferry.service/cgroup.procs | wc -l')" = 2
    traffic_join upgrade
    check "no datagram was lost, doubled or overtaken" jq -es 'last | .lost == 0 and .duplicated == 0 and .reordered == 0' "$LOG/upgrade.log"
    [ "$(sd_link)" = "$link" ] || fail "the guest has noticed the upgrade"
}

# Everything of the service is killed at once, helper and all: systemd has kept what the next process needs, and the guest stays connected.
sd_survives() {
    local process link killed up
    process=$(sd_property ringferry MainPID) link=$(sd_link)
    sd_under survive
    killed=${EPOCHREALTIME/[.,]/}
    check "SIGKILL" sd systemctl kill --signal=KILL ringferry
    check "systemd starts it anew" wait_for 10 sd_is_another "$process"
    check "it goes on where the other one was killed" wait_for 5 sd_said 'this goes on where a process was killed ports=[34]'
    [ "$(sd_property ringferry NRestarts)" = 1 ] || fail "started anew $(sd_property ringferry NRestarts) times"
    traffic_join survive
    [ "$(sd_link)" = "$link" ] || fail "the guest has noticed"
    up=$(sd journalctl -o json "_SYSTEMD_INVOCATION_ID=$(sd_property ringferry InvocationID)" | jq -r 'select(.MESSAGE | tostring | test("this goes on where")) | .__REALTIME_TIMESTAMP')
    note "killed: it went on after $(((up - killed) / 1000)) ms; $(jq -rs 'last | "of \(.sent_packets) datagrams \(.lost) lost, \(.duplicated) doubled"' "$LOG/survive.log")"
    check "and again, without traffic" sd systemctl kill --signal=KILL ringferry
    check "the guest is back" wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.1
    [ "$(sd_link)" = "$link" ] || fail "the guest has noticed the second time"
}

# A program that crashes as it starts takes nothing over: the reload fails, and the one that runs goes on.
sd_not_upgraded() {
    local process
    process=$(sd_property ringferry MainPID)
    # shellcheck disable=SC2016 # expanded in the other shell
    printf '#!/bin/sh\nkill -SEGV $$\n' >"$RUN/crash"
    install -m 755 "$RUN/crash" "$SD_ROOT/usr/bin/ringferry"
    sd_under crash
    ! sd systemctl reload ringferry || fail "a reload succeeds whose new program crashes"
    traffic_join crash
    check "no datagram was lost" jq -es 'last | .lost == 0' "$LOG/crash.log"
    [ "$(sd_property ringferry ActiveState) $(sd_property ringferry MainPID)" = "active $process" ] || fail "the service did not survive a new program that crashes"
    install -m 755 "$RINGFERRY" "$SD_ROOT/usr/bin/ringferry"
}

# Restarted and killed, with a guest that is sending: systemd holds the sockets meanwhile.
sd_comes_back() {
    local process socket
    socket=$(sd stat -c %i /run/ringferry/vm0.sock)
    traffic_launch restart ns:a 10.9.0.1 5 tcp-both
    sleep 0.5
    check "restart" sd systemctl restart ringferry
    [ "$(sd ringferry ctl rules vm0 --json | jq -r '.. | .rate_in? // empty')" != '' ] || fail "the rule that was kept is not there"
    # Traffic first, so that what is killed is a switch that serves.
    check "the guest is back" wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.1
    process=$(sd_property ringferry MainPID)
    sd sh -c "kill -KILL $process"
    check "systemd starts it anew" wait_for 10 sd_is_another "$process"
    check "the guest is back again" wait_for 10 in_ns a ping -n -q -c 1 -W 1 10.9.0.1
    [ "$(sd_property ringferry NRestarts)" = 1 ] || fail "started anew $(sd_property ringferry NRestarts) times"
    [ "$(sd stat -c %i /run/ringferry/vm0.sock)" = "$socket" ] || fail "the socket is another one"
    check "one switch, one helper" test "$(sd sh -c 'cat /sys/fs/cgroup/system.slice/ringferry.service/cgroup.procs | wc -l')" = 2
    traffic_join restart
}

sd_is_another() {
    [ "$(sd_property ringferry ActiveState)" = active ] && [ "$(sd_property ringferry MainPID)" != "$1" ]
}

# A service that was stopped ends cleanly, and the next front end has it started.
sd_stops() {
    rf_stop vm0
    check "stop" sd systemctl stop ringferry
    [ "$(sd_property ringferry Result) $(sd_property ringferry ExecMainStatus)" = 'success 0' ] || fail "it did not end well: $(sd systemctl status ringferry)"
    [ "$(sd_property ringferry NFileDescriptorStore)" = 0 ] || fail "systemd keeps descriptors of a service that was stopped"
    check "the tap stays" in_ns m test -d /sys/class/net/rf0
    check "its port's own socket does not" sd test ! -e /run/ringferry/vm2.sock
    check "systemd's sockets do" sd systemctl is-active ringferry-vm@vm0.socket ringferry-vm@vm1.socket
    rf_start vm0 a guest --socket "$SD_ROOT/run/ringferry/vm0.sock" --tap rf0 --address 10.9.0.2/24
    check "a front end starts it" wait_for 10 sd systemctl is-active ringferry
    traffic_check ns:a 10.9.0.1 1 tcp-both
}
