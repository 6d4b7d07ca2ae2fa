# QEMU 10 and Linux 6.12 from bookworm-backports, beside the release's own: unpacked into work/backports, not installed, and known to apt only here.

BACKPORTS=$WORK/backports

# backports_fetch: once; and once a run the guest's initramfs with today's ringferry.
backports_fetch() {
    [ -f "$BACKPORTS/vmlinuz" ] || backports_download
    [ -n "${BACKPORTS_READY:-}" ] || image_build_initrd backports
    BACKPORTS_READY=1
}

backports_download() {
    local lists=$BACKPORTS/apt kernel deb missing
    rm -rf "$BACKPORTS"
    mkdir -p "$BACKPORTS/debs"
    apt_beside "$lists" bookworm-backports
    kernel=$(apt_kernel linux-image-amd64/bookworm-backports)
    echo "fetching from bookworm-backports: qemu-system-x86, $kernel" >&2
    (cd "$BACKPORTS/debs" && apt-get "${APT[@]}" download qemu-system-{x86,data}/bookworm-backports seabios/bookworm-backports "$kernel") ||
        die "apt-get download failed"
    for deb in "$BACKPORTS"/debs/{qemu,seabios}*.deb; do dpkg-deb -x "$deb" "$BACKPORTS"; done
    missing=$(ldd "$BACKPORTS/usr/bin/qemu-system-x86_64" | sed -n 's/ => not found//p')
    [ -z "$missing" ] || die "QEMU from backports lacks libraries: $missing"
    image_take_kernel backports "$BACKPORTS"/debs/linux-image-*.deb
    rm -rf "$BACKPORTS/debs" "$lists"
}

# backports_use: from here on vm_start means these. Their MSI-X works without KVM: an interrupt for each queue.
backports_use() {
    QEMU=("$BACKPORTS/usr/bin/qemu-system-x86_64" -L "$BACKPORTS/usr/share/seabios" -L "$BACKPORTS/usr/share/qemu")
    QEMU_NIC=''
    KERNEL=$BACKPORTS/vmlinuz
    INITRD=$BACKPORTS/initrd.cpio
}
