# What is fetched once: the packages of Xen and the kernel, unpacked into $CACHE. Nothing is installed.

fetch_all() {
    [ ! -f "$CACHE/fetched" ] || [ "$HERE/packages.xen" -nt "$CACHE/fetched" ] || return 0
    local names
    mkdir -p "$CACHE/debs"
    apt_update
    mapfile -t names < <(sed 's/#.*//; s/[[:space:]]*$//; /^$/d' "$HERE/packages.xen")
    # The name of the kernel's package has its version in it, which Debian changes from time to time.
    names+=("$(apt-cache depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[0-9][^ ]*\)$/\1/p' | head -n 1)")
    [ -n "${names[-1]}" ] || die "apt knows no linux-image-amd64: is this Debian 12 on amd64?"
    echo "fetching ${#names[@]} packages" >&2
    # apt's download sandbox user may not be allowed to write here.
    (cd "$CACHE/debs" && apt-get -qq -o APT::Sandbox::User=root download "${names[@]}") || die "apt-get download failed"
    rm -rf "$CACHE/unpacked"
    mkdir -p "$CACHE/unpacked"
    local deb
    for deb in "$CACHE"/debs/*.deb; do dpkg-deb -x "$deb" "$CACHE/unpacked"; done
    rm -rf "$CACHE/debs"
    gunzip -c "$CACHE"/unpacked/boot/xen-4.17-amd64.gz >"$CACHE/xen"
    fetch_vmlinux "$CACHE"/unpacked/boot/vmlinuz-* >"$CACHE/vmlinux.full"
    strip -o "$CACHE/vmlinux" "$CACHE/vmlinux.full"
    rm "$CACHE/vmlinux.full"
    "$(command -v busybox)" depmod -b "$CACHE/unpacked" "$(kernel_version)"
    touch "$CACHE/fetched"
}

kernel_version() {
    basename "$CACHE"/unpacked/lib/modules/*
}

# The kernel itself out of a bzImage (Documentation/arch/x86/boot.rst: setup_sects, payload_offset, payload_length), so that
# neither Xen nor xl has to decompress it on an emulated CPU: seconds for each boot and each guest.
fetch_vmlinux() {
    local sectors offset length
    sectors=$(od -An -tu1 -j $((0x1f1)) -N 1 "$1")
    offset=$(od -An -tu4 -j $((0x248)) -N 4 "$1")
    length=$(od -An -tu4 -j $((0x24c)) -N 4 "$1")
    # The payload ends with its unpacked length, which is not part of the xz stream.
    dd if="$1" iflag=skip_bytes,count_bytes skip=$(((sectors + 1) * 512 + offset)) count=$((length)) bs=1M status=none |
        xz -dc --single-stream
}
