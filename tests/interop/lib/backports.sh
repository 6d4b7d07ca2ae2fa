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
    mkdir -p "$lists/state/lists/partial" "$lists/cache/archives/partial" "$BACKPORTS/debs"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR bookworm-backports main" >"$lists/sources.list"
    local apt=(-qq -o "Dir::Etc::SourceList=$lists/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$lists/state/lists"
        -o "Dir::Cache=$lists/cache" -o APT::Sandbox::User=root)
    apt-get "${apt[@]}" update >"$WORK/apt.log" 2>&1 || die "apt-get update failed, see $WORK/apt.log"
    kernel=$(apt-cache "${apt[@]}" depends linux-image-amd64/bookworm-backports | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
    [ -n "$kernel" ] || die "bookworm-backports has no linux-image-amd64"
    echo "fetching from bookworm-backports: qemu-system-x86, $kernel" >&2
    (cd "$BACKPORTS/debs" && apt-get "${apt[@]}" download qemu-system-{x86,data}/bookworm-backports seabios/bookworm-backports "$kernel") ||
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
