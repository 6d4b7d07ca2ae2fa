# A machine whose first process is a real systemd, without a kernel of its own: namespaces, a cgroup, and a Debian tree with a layer above it
# that is in memory and gone with the machine.
#
#   systemd_tree trixie      once: the tree, by debootstrap, into work/tree.trixie
#   systemd_boot trixie      the machine; it ends with the case
#   sd COMMAND...            runs there as root; /src is this repository, and $SD_ROOT the machine's root as others see it
#   sd_install               what docs/operating.md says, as written
#
# Sockets of the machine can be reached from outside: $SD_ROOT/run/ringferry/vm0.sock.

# The packages of a tree beyond the essential ones.
TREE_PACKAGES=systemd,iproute2

systemd_tree() {
    local suite=$1 tree=$WORK/tree.$1
    [ ! -d "$tree" ] || return 0
    echo "fetching Debian $suite, with systemd" >&2
    rm -rf "$tree.new"
    debootstrap --variant=minbase "--include=$TREE_PACKAGES" "$suite" "$tree.new" "$MIRROR" >"$WORK/debootstrap.log" 2>&1 ||
        die "debootstrap $suite failed, see $WORK/debootstrap.log"
    rm -rf "$tree.new"/var/cache/apt/* "$tree.new"/var/lib/apt/lists/* "$tree.new"/usr/share/{doc,locale,man}
    mv "$tree.new" "$tree"
}

# systemd_boot SUITE: returns when the machine is up. Sets SD_ROOT.
systemd_boot() {
    local state
    mkdir "$RUN/machine"
    echo "${PREFIX}systemd" >"$RUN/cgroup"
    spawn systemd unshare --mount "$HERE/lib/systemd-machine" "$WORK/tree.$1" "$RUN/machine" "$(cat "$RUN/cgroup")" "$(realpath "$HERE/../..")"
    wait_for 10 systemd_runs || fail "systemd does not start"
    SD_ROOT=/proc/$(pgrep -P "${PID[systemd]}")/root
    # No state is known before systemd listens.
    wait_for 30 systemd_is_up || fail "the machine is not up"
    state=$(sd systemctl is-system-running || true)
    [ "$state" = running ] || fail "the machine is $state: $(sd systemctl list-units --failed --plain --no-legend)"
    install -m 755 "$RINGFERRY" "$SD_ROOT/usr/bin/ringferry"
    # Debian's package udev makes it, which a machine without devices has not got.
    sd groupadd --system kvm
}

systemd_runs() {
    ! alive systemd || [ "$(cat "/proc/$(pgrep -P "${PID[systemd]}")/comm")" = systemd ]
}

systemd_is_up() {
    [[ $(sd systemctl is-system-running || true) =~ ^(running|degraded|maintenance)$ ]]
}

# sd COMMAND...
sd() {
    nsenter --target "$(basename "${SD_ROOT%/root}")" --mount --pid --net --uts --ipc --cgroup --root --wd \
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 SYSTEMD_PAGER='' SYSTEMD_COLORS=0 "$@"
}

# sd_install: the commands of the section "As a service", which are for somebody who is not root.
sd_install() {
    local commands
    commands=$(sed -n '/^### As a service/,/^### /p' "$HERE/../../docs/operating.md" | sed -n '/^```sh/,/^```/{/^```/d;p}')
    [[ $commands == *systemd-tmpfiles* ]] || fail "docs/operating.md does not say how to install the service"
    printf '#!/bin/sh\nexec "$@"\n' >"$SD_ROOT/usr/bin/sudo"
    chmod 755 "$SD_ROOT/usr/bin/sudo"
    sd sh -exc "cd /src; $commands"
}

# sd_property UNIT NAME
sd_property() {
    sd systemctl show --property "$2" --value "$1"
}

# systemd_remove NAME: the cgroup of a machine that has ended.
systemd_remove() {
    # shellcheck disable=SC2016 # expanded in the other shell
    unshare --mount bash -c '
        mount -t cgroup2 cgroup2 /mnt && cd /mnt && [ -d "$1" ] || exit 0
        for try in {1..50}; do
            find "$1" -depth -type d -exec rmdir {} + 2>/dev/null && exit
            sleep 0.1
        done' bash "$1"
}
