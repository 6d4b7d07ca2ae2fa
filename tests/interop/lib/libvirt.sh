# Machines with Debian's libvirt, on that of systemd.sh: a real libvirtd, and QEMU as its own user, whom only the socket unit lets in.

libvirt_fetch() {
    systemd_tree_with bookworm libvirt libvirt-daemon-system libvirt-clients libvirt-daemon-driver-qemu qemu-system-x86
}

# libvirt_boot NAME: a machine with libvirtd and with ringferry as documented, and its network as the namespace NAME.
libvirt_boot() {
    systemd_boot bookworm-libvirt "$1"
    ip netns attach "$PREFIX$1" "$(basename "${SD_ROOT%/root}")"
    sd_install
    # Machines on one host have one hardware, and libvirt does not migrate to the host that it is on.
    echo "host_uuid = \"$(cat /proc/sys/kernel/random/uuid)\"" >>"$SD_ROOT/etc/libvirt/libvirtd.conf"
    sd systemctl restart libvirtd
}

# libvirt_domain: what docs/libvirt.md says, as far as an emulated processor allows: without KVM, with little memory, and with a kernel from outside in place of
# a disk. QEMU 7.2 without KVM crashes when the guest uses MSI-X.
libvirt_domain() {
    local kernel="<kernel>/src/tests/interop/work/stable/vmlinuz</kernel><initrd>/src/tests/interop/work/stable/initrd.cpio</initrd>"
    kernel+="<cmdline>$GUEST_COMMAND_LINE pci=nomsi alone=10.9.0.2/24</cmdline>"
    sed -n '/^```xml/,/^```/{/^```/d;p}' "$HERE/../../docs/libvirt.md" | sed -n '1,/<\/domain>/p' |
        sed -e "s/type='kvm'/type='qemu'/" -e "s|<memory unit='GiB'>1<|<memory unit='MiB'>256<|" -e "s|.*</type>|&$kernel|" \
            -e "s|</devices>|<serial type='file'><source path='/tmp/console'/></serial></devices>|" >"$SD_ROOT/root/vm0.xml"
    sed -n '/<interface/,/<\/interface>/p' "$SD_ROOT/root/vm0.xml" >"$SD_ROOT/root/nic.xml"
    grep -q '<interface' "$SD_ROOT/root/nic.xml" || fail "docs/libvirt.md has no domain any more"
}

# libvirt_log: what libvirtd said, and QEMU and the guest, goes to the log folder.
libvirt_log() {
    sd journalctl -o cat -u libvirtd -u ringferry >"$LOG/journal" 2>&1 || true
    cat "$SD_ROOT"/var/log/libvirt/qemu/*.log >"$LOG/qemu.log" 2>/dev/null || true
    cp "$SD_ROOT/tmp/console" "$LOG/console" 2>/dev/null || true
}
