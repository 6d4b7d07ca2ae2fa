# What is given to others: the Debian package in a clean Debian 12 with a real systemd, and the image for containers under crun.
#
#   namespace a: tap rf0 - ringferry guest - vm0.sock ┐
#                                                     ├ ringferry.service, from the package - tap rf0: namespace m, which is the machine's

case_add package-deb 120 package_deb "the Debian package: lintian, install, service, upgrade under traffic, remove; a purge leaves nothing" systemd_tree bookworm
case_add package-oci 60 package_oci "the image for containers: the same bytes twice, static, runs as user 65532 with no right under crun, two guests through it"

package_deb() {
    local before package process metrics
    check "the package is built" "$HERE/../../contrib/debian/build" --program "$RINGFERRY" --out "$RUN"
    package=$(echo "$RUN"/ringferry_*.deb)
    note "$(stat -c %s "$package") bytes"
    check "lintian finds no error" lintian --allow-root --fail-on error "$package"
    check "the AppArmor profile is one" apparmor_parser --skip-kernel-load --skip-cache "$HERE/../../contrib/apparmor/ringferry"
    systemd_boot bookworm
    rm "$SD_ROOT/usr/bin/ringferry"
    before=$(package_files)
    cp "$package" "$SD_ROOT/tmp/ringferry.deb"
    check "it is installed" sd dpkg -i /tmp/ringferry.deb
    [ "$(sd_property ringferry ActiveState)" = inactive ] || fail "the service runs before anybody has said what guests there are"
    check "management programs find the back end" sd /usr/libexec/ringferry-net --print-capabilities
    check "the configuration is valid" sd ringferry run --check --control /run/ringferry/control.sock /etc/ringferry/ringferry.toml
    check "the service is started" sd systemctl enable --now ringferry-vm@vm0.socket ringferry-vm@vm1.socket ringferry.service

    sd_guest

    check "its counters are served" sd systemctl enable --now ringferry-metrics.service
    package_scraped
    check "its page is served" sd systemctl enable --now ringferry-page.service
    wait_for 5 package_page || fail "no page: $(sd systemctl status ringferry-page)"

    # Another program, by a byte that no loader reads.
    metrics=$(sd_property ringferry-metrics MainPID) process=$(sd_property ringferry MainPID)
    cp "$RINGFERRY" "$RUN/newer"
    printf x >>"$RUN/newer"
    check "another package is built" "$HERE/../../contrib/debian/build" --program "$RUN/newer" --out "$RUN"
    cp "$package" "$SD_ROOT/tmp/ringferry.deb"
    traffic_launch upgrade ns:a 10.9.0.1 4 tcp-both
    check "it is upgraded" sd dpkg -i /tmp/ringferry.deb
    check "the new program has taken over" wait_for 10 sd_is_another "$process"
    traffic_join upgrade
    [ "$(sd_property ringferry-metrics MainPID)" != "$metrics" ] || fail "the old program still serves the counters"
    package_scraped
    rf_stop vm0

    check "it is removed" sd dpkg --remove ringferry
    [ "$(sd_property ringferry ActiveState)" = inactive ] || fail "the service still runs"
    check "the configuration is kept" sd test -f /etc/ringferry/ringferry.toml
    check "it is purged" sd dpkg --purge ringferry
    diff <(echo "$before") <(package_files) >"$LOG/left" || fail "a purge leaves: $(grep '^[<>]' "$LOG/left")"
    ! sd getent passwd ringferry || fail "a purge leaves the user"
    check "sockets are gone" sd test ! -e /run/ringferry
}

# The guest's packets are counted, as whoever may open the socket reads.
package_scraped() {
    wait_for 5 test -S "$SD_ROOT/run/ringferry/metrics.sock" || fail "no socket for scrapers: $(sd systemctl status ringferry-metrics)"
    check "a scrape" socat -t 5 "UNIX-CONNECT:$SD_ROOT/run/ringferry/metrics.sock" - <<<$'GET /metrics HTTP/1.0\n' >"$LOG/scrape"
    grep -q '^ringferry_port_rx_packets_total{port="vm0"} [1-9]' "$LOG/scrape" || fail "no packets are counted: $(head -n 5 "$LOG/scrape")"
}

package_page() {
    sd bash -c 'exec 3<>/dev/tcp/127.0.0.1/9483; printf "GET / HTTP/1.0\r\nHost: localhost\r\n\r\n" >&3; grep -q " 200 " <&3'
}

# What there is in the machine, but for what dpkg, the logs and the user database write whenever anything is installed.
package_files() {
    sd find / -xdev \( -path /tmp -o -path /var/log -o -path /var/cache -o -path '/var/lib/dpkg/*-old' -o -path /var/lib/dpkg/lock -o -path /src \) -prune -o -print |
        grep -v '^/etc/\(passwd\|group\|shadow\|gshadow\|subuid\|subgid\)-$\|^/etc/.pwd.lock$\|^/var/lib/systemd\|^/var/lib/dpkg/triggers' | sort
}

package_oci() {
    local bundle=$RUN/bundle static pid status line
    static=${CARGO_TARGET_DIR:-$HERE/../../target}/x86_64-unknown-linux-gnu/quick/ringferry
    [ -x "$static" ] || fail "$static is missing: RUSTFLAGS='-C target-feature=+crt-static' cargo build --profile quick --target x86_64-unknown-linux-gnu -p ringferry"
    check "the image is built" "$HERE/../../contrib/oci/build" --out "$RUN/image.tar" "$static"
    check "and again" "$HERE/../../contrib/oci/build" --out "$RUN/again.tar" "$static"
    cmp "$RUN/image.tar" "$RUN/again.tar" || fail "the same program makes two different images"
    ! "$HERE/../../contrib/oci/build" --out "$RUN/dynamic.tar" "$RINGFERRY" || fail "an image is made of a program that wants libraries"
    mkdir "$RUN/image" "$RUN/sockets"
    tar -xf "$RUN/image.tar" -C "$RUN/image"
    check "it is an image to others" umoci unpack --image "$RUN/image:$(package_version)" "$bundle"
    [ "$(jq -r '"\(.process.user.uid) \(.process.args[0])"' "$bundle/config.json")" = "65532 /usr/bin/ringferry" ] || fail "it runs as $(jq -c .process "$bundle/config.json")"
    chown 65532:65532 "$RUN/sockets"
    # Two guests, and no tap: nothing that needs a right.
    jq --arg sockets "$RUN/sockets" '
        .process.terminal = false | .process.args = ["/usr/bin/ringferry", "run", "--control", "/run/ringferry/control.sock",
            "--port", "vhost-user:/run/ringferry/a.sock", "--port", "vhost-user:/run/ringferry/b.sock"] |
        .process.capabilities = {} | .process.noNewPrivileges = true | .root.readonly = true | del(.linux.resources) |
        .mounts = [.mounts[] | select(.destination != "/run/ringferry" and .type != "cgroup")] +
            [{destination: "/run/ringferry", type: "bind", source: $sockets, options: ["bind", "rw"]}]' "$bundle/config.json" >"$RUN/config"
    mv "$RUN/config" "$bundle/config.json"
    # crun wants one hierarchy of cgroups alone, even if it is to make none; other machines have those of the old version beside it.
    # shellcheck disable=SC2016 # expanded in the other shell
    spawn container unshare --mount sh -c '[ -f /sys/fs/cgroup/cgroup.procs ] || mount -t cgroup2 cgroup2 /sys/fs/cgroup; exec "$@"' sh \
        crun --root "$RUN/crun" --cgroup-manager=disabled run --bundle "$bundle" "${PREFIX}container"
    wait_for 10 test -S "$RUN/sockets/b.sock" || fail "the container does not start: $(said container)"
    wait_for 10 "$RINGFERRY" ctl --control "$RUN/sockets/control.sock" show || fail "the switch does not answer"
    pid=$(crun --root "$RUN/crun" --cgroup-manager=disabled state "${PREFIX}container" | jq -r .pid)
    status=$(tr '\t' ' ' <"/proc/$pid/status")
    for line in 'Uid: 65532 65532 65532 65532' 'CapEff: 0000000000000000' 'CapBnd: 0000000000000000' 'NoNewPrivs: 1' 'Seccomp: 2'; do
        grep -qx "$line" <<<"$status" || fail "the switch has more rights than it should: no $line"
    done
    netns_add a b
    rf_start guest-a a guest --socket "$RUN/sockets/a.sock" --tap rf0 --address 10.9.0.1/24
    rf_start guest-b b guest --socket "$RUN/sockets/b.sock" --tap rf0 --address 10.9.0.2/24
    wait_for 5 in_ns a ping -n -q -c 1 -W 1 10.9.0.2 || fail "no path within 5 s"
    traffic_server ns:b
    traffic_check ns:a 10.9.0.2 1 tcp-both udp
    rf_stop guest-a
    rf_stop guest-b
    crun --root "$RUN/crun" --cgroup-manager=disabled kill "${PREFIX}container" TERM
    wait_for 5 not_running "${PID[container]}" || fail "the container does not end"
    wait "${PID[container]}" || fail "the container ends with $?"
    unset "PID[container]"
}

package_version() {
    sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' "$HERE/../../Cargo.toml"
}
