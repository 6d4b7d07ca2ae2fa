# A machine whose first process is a real systemd, without a kernel of its own: namespaces, a cgroup, and a Debian tree with a layer above it
# that is in memory and gone with the machine.
#
#   systemd_tree trixie      once: the tree, by debootstrap, into work/tree.trixie
#   systemd_boot trixie      the machine; it ends with the case. With a second word, that is its name, and there may be several
#   sd COMMAND...            runs there as root; /src is this repository, and $SD_ROOT the machine's root as others see it
#   sd_use NAME              which of several is meant from here on
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
    systemd_tree_shrink "$tree.new"
    mv "$tree.new" "$tree"
}

# systemd_tree_with SUITE NAME PACKAGE...: a tree SUITE-NAME with further packages, without what they recommend, by the tree's own apt.
systemd_tree_with() {
    local from=$WORK/tree.$1 tree=$WORK/tree.$1-$2
    systemd_tree "$1"
    [ ! -d "$tree" ] || return 0
    echo "adding to Debian $1: ${*:3}" >&2
    rm -rf "$tree.new"
    cp -a "$from" "$tree.new"
    # shellcheck disable=SC2016 # expanded in the other shell
    unshare --mount --pid --fork bash -euc '
        tree=$1
        mount --make-rprivate /
        mount -t proc proc "$tree/proc"
        mount -t tmpfs tmpfs "$tree/run"
        mount -t tmpfs tmpfs "$tree/tmp"
        mount --bind /etc/resolv.conf "$tree/etc/resolv.conf"
        chroot "$tree" apt-get -qq update
        # No service starts in a tree.
        mount --bind /bin/false "$tree/usr/bin/systemctl"
        DEBIAN_FRONTEND=noninteractive chroot "$tree" apt-get -qq -y --no-install-recommends -o Dpkg::Options::=--force-unsafe-io install "${@:2}"' \
        bash "$tree.new" "${@:3}" >"$WORK/apt.log" 2>&1 || die "apt-get install into $tree.new failed, see $WORK/apt.log"
    systemd_tree_shrink "$tree.new"
    mv "$tree.new" "$tree"
}

# What no machine needs.
systemd_tree_shrink() {
    rm -rf "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/* "$1"/usr/share/{doc,locale,man}
}

# systemd_boot TREE [NAME]: returns when the machine is up. Sets SD_ROOT.
systemd_boot() {
    local state name=${2:-systemd}
    mkdir "$RUN/$name"
    echo "$PREFIX$name" >>"$RUN/cgroups"
    spawn "$name" unshare --mount "$HERE/lib/systemd-machine" "$WORK/tree.$1" "$RUN/$name" "$PREFIX$name" "$name" "$(realpath "$HERE/../..")"
    wait_for 10 systemd_runs "$name" || fail "systemd does not start"
    sd_use "$name"
    # No state is known before systemd listens.
    wait_for 30 systemd_is_up || fail "the machine is not up"
    state=$(sd systemctl is-system-running || true)
    [ "$state" = running ] || fail "the machine is $state: $(sd systemctl list-units --failed --plain --no-legend)"
    install -m 755 "$RINGFERRY" "$SD_ROOT/usr/bin/ringferry"
    # Debian's package udev makes it, which a machine without devices has not got.
    sd sh -c 'getent group kvm || groupadd --system kvm' >/dev/null
}

sd_use() {
    SD_ROOT=/proc/$(pgrep -P "${PID[$1]}")/root
}

systemd_runs() {
    ! alive "$1" || [ "$(cat "/proc/$(pgrep -P "${PID[$1]}")/comm")" = systemd ]
}

systemd_is_up() {
    [[ $(sd systemctl is-system-running || true) =~ ^(running|degraded|maintenance)$ ]]
}

# sd COMMAND...
sd() {
    nsenter --target "$(basename "${SD_ROOT%/root}")" --mount --pid --net --uts --ipc --cgroup --root --wd \
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 SYSTEMD_PAGER='' SYSTEMD_COLORS=0 "$@"
}

# sd_guest: a guest on the service's port vm0, in namespace a, that talks with the machine's end of the tap, in namespace m.
sd_guest() {
    netns_add a
    ip netns attach "${PREFIX}m" "$(basename "${SD_ROOT%/root}")"
    ns_up m rf0 1
    rf_start vm0 a guest --socket "$SD_ROOT/run/ringferry/vm0.sock" --tap rf0 --address 10.9.0.2/24
    traffic_server ns:m
    traffic_check ns:a 10.9.0.1 1 tcp-both
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

# systemd_remove FOLDER: the cgroups of the machines of a case that has ended; FOLDER is its RUN.
systemd_remove() {
    [ -f "$1/cgroups" ] || return 0
    # shellcheck disable=SC2016 # expanded in the other shell
    unshare --mount bash -c '
        mount -t cgroup2 cgroup2 /mnt && cd /mnt || exit
        while read -r name; do
            for try in {1..50}; do
                [ ! -d "$name" ] || find "$name" -depth -type d -exec rmdir {} + 2>/dev/null && break
                sleep 0.1
            done
        done' <"$1/cgroups"
}
