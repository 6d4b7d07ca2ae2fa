# What is given to others: the Debian package in a clean Debian 12 with a real systemd.
#
#   namespace a: tap rf0 - ringferry guest - vm0.sock ┐
#                                                     ├ ringferry.service, from the package - tap rf0: namespace m, which is the machine's

case_add package-deb 120 package_deb "the Debian package: lintian, install, service, upgrade under traffic, remove; a purge leaves nothing" systemd_tree bookworm

package_deb() {
    local before package process
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

    netns_add a
    ip netns attach "${PREFIX}m" "$(basename "${SD_ROOT%/root}")"
    ns_up m rf0 1
    rf_start vm0 a guest --socket "$SD_ROOT/run/ringferry/vm0.sock" --tap rf0 --address 10.9.0.2/24
    traffic_server ns:m
    traffic_check ns:a 10.9.0.1 1 tcp-both

    # Another program, by a byte that no loader reads.
    process=$(sd_property ringferry MainPID)
    cp "$RINGFERRY" "$RUN/newer"
    printf x >>"$RUN/newer"
    check "another package is built" "$HERE/../../contrib/debian/build" --program "$RUN/newer" --out "$RUN"
    cp "$package" "$SD_ROOT/tmp/ringferry.deb"
    traffic_launch upgrade ns:a 10.9.0.1 4 tcp-both
    check "it is upgraded" sd dpkg -i /tmp/ringferry.deb
    check "the new program has taken over" wait_for 10 sd_is_another "$process"
    traffic_join upgrade
    rf_stop vm0

    check "it is removed" sd dpkg --remove ringferry
    [ "$(sd_property ringferry ActiveState)" = inactive ] || fail "the service still runs"
    check "the configuration is kept" sd test -f /etc/ringferry/ringferry.toml
    check "it is purged" sd dpkg --purge ringferry
    diff <(echo "$before") <(package_files) >"$LOG/left" || fail "a purge leaves: $(grep '^[<>]' "$LOG/left")"
    ! sd getent passwd ringferry || fail "a purge leaves the user"
    check "sockets are gone" sd test ! -e /run/ringferry
}

# What there is in the machine, but for what dpkg, the logs and the user database write whenever anything is installed.
package_files() {
    sd find / -xdev \( -path /tmp -o -path /var/log -o -path /var/cache -o -path '/var/lib/dpkg/*-old' -o -path /var/lib/dpkg/lock -o -path /src \) -prune -o -print |
        grep -v '^/etc/\(passwd\|group\|shadow\|gshadow\|subuid\|subgid\)-$\|^/etc/.pwd.lock$\|^/var/lib/systemd\|^/var/lib/dpkg/triggers' | sort
}
