# The guests: Debian's stock kernels from their packages (not installed here), and an initramfs made of this host's programs, the few
# modules a virtio guest needs, and our own `ringferry` as the payload verifier. Everything is cached in work/.
#
#   work/base.cpio              the programs
#   work/KERNEL/                for each kernel: vmlinuz, modules.cpio, and initrd.cpio, which is all of it in a row; `stable` is the release's own

# Which kernel vm_start boots.
KERNEL=$WORK/stable/vmlinuz
INITRD=$WORK/stable/initrd.cpio

# In insmod order: virtio.ko needs virtio_ring.ko first in 6.1. In later kernels some are built in, then the file is simply not there.
GUEST_MODULES=(
    drivers/virtio/virtio_ring drivers/virtio/virtio drivers/virtio/virtio_pci_modern_dev drivers/virtio/virtio_pci_legacy_dev
    drivers/virtio/virtio_pci net/core/failover drivers/net/net_failover drivers/net/virtio_net
    fs/netfs/netfs fs/fscache/fscache net/9p/9pnet net/9p/9pnet_virtio fs/9p/9p
)
# dash and timeout are not busybox's: what those start is busybox's own `ip` and `ping`, whatever PATH says.
GUEST_PROGRAMS=(dash timeout ip ethtool iperf3 ping)

image_build() {
    [ -f "$WORK/stable/vmlinuz" ] || image_fetch_kernel
    if [ ! -f "$WORK/base.cpio" ] || [ -n "$(find "$HERE/guest" "$HERE/lib/image.sh" -newer "$WORK/base.cpio")" ]; then
        image_build_base
    fi
    image_build_initrd stable
}

# image_build_initrd KERNEL: the kernel unpacks concatenated archives in turn, so a new ringferry costs only its own few megabytes.
# Not compressed: the emulated CPU needs half a second to decompress it.
image_build_initrd() {
    local tree=$WORK/root.ringferry
    rm -rf "$tree"
    mkdir -p "$tree"
    image_add_program "$tree" "$RINGFERRY" bin/ringferry
    { cat "$WORK/base.cpio" "$WORK/$1/modules.cpio" && image_pack "$tree"; } >"$WORK/$1/initrd.cpio"
}

image_fetch_kernel() {
    local package
    apt_update
    package=$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)
    [ -n "$package" ] || die "apt knows no linux-image-amd64: is this Debian 12 on amd64?"
    echo "fetching the guest kernel: $package" >&2
    rm -rf "$WORK/debs"
    mkdir -p "$WORK/debs"
    # apt's download sandbox user may not be allowed to write here.
    (cd "$WORK/debs" && apt-get -qq -o APT::Sandbox::User=root download "$package") || die "apt-get download $package failed"
    image_take_kernel stable "$WORK"/debs/linux-image-*.deb
    rm -rf "$WORK/debs"
}

# image_take_kernel KERNEL DEB: the kernel and the modules that a guest needs, out of a package.
image_take_kernel() {
    local folder=$WORK/$1 module file tree=$WORK/root.modules
    rm -rf "$WORK/kernel" "$tree"
    mkdir -p "$WORK/kernel" "$tree/modules" "$folder"
    dpkg-deb -x "$2" "$WORK/kernel"
    for module in "${GUEST_MODULES[@]}"; do
        for file in "$WORK"/kernel/lib/modules/*/kernel/"$module".ko{,.xz}; do
            [ ! -f "$file" ] || cp "$file" "$tree/modules/"
        done
        basename "$module" >>"$tree/modules/order"
    done
    find "$tree/modules" -name '*.xz' -exec xz -d {} +
    image_pack "$tree" >"$folder/modules.cpio"
    # Last: what is there is whole.
    cp "$WORK"/kernel/boot/vmlinuz-* "$folder/vmlinuz"
    rm -rf "$WORK/kernel"
}

image_build_base() {
    local tree=$WORK/root.base program applet
    rm -rf "$tree"
    mkdir -p "$tree"/{bin,dev,proc,sys,tmp,run,etc,share}
    ln -s bin "$tree/sbin"
    cp "$(command -v busybox)" "$tree/bin/busybox"
    for applet in $("$tree/bin/busybox" --list); do
        [ "$applet" = busybox ] || ln -s busybox "$tree/bin/$applet"
    done
    for program in "${GUEST_PROGRAMS[@]}"; do
        rm -f "$tree/bin/$program"
        image_add_program "$tree" "$(command -v "$program")" "bin/$program"
    done
    ln -sf dash "$tree/bin/sh"
    echo 'root:x:0:0:root:/:/bin/sh' >"$tree/etc/passwd"
    install -m 755 "$HERE/guest/init" "$tree/init"
    install -m 755 "$HERE/guest/agent" "$tree/bin/agent"
    image_pack "$tree" >"$WORK/base.cpio"
}

# image_add_program TREE FILE PLACE: the program and the shared libraries it loads (none when it is static).
image_add_program() {
    local tree=$1 file=$2 place=$3 library
    install -D -m 755 "$(readlink -f "$file")" "$tree/$place"
    { ldd "$file" 2>/dev/null | grep -o '/[^ ]*' || true; } | while read -r library; do
        install -D -m 755 "$(readlink -f "$library")" "$tree$library"
    done
}

image_pack() {
    (cd "$1" && find . | cpio -o -H newc --quiet)
}
