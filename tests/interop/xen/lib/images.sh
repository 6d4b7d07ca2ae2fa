# The images of both domains. What changes seldom is cached; programs of ours go into archives of their own behind it, as the
# kernel unpacks concatenated archives in turn. Not compressed: the emulated CPU is slow at that.

DOM0_MODULES=(xen-gntdev xen-gntalloc xen-evtchn xen-privcmd xenfs xen-netback bridge tun veth virtio_pci 9pnet_virtio 9p)
DOMU_MODULES=(xen-gntdev xen-gntalloc xen-evtchn xen-privcmd xenfs xen-netfront xen-netback bridge tun veth)
# Of this machine. dash and timeout are not busybox's: what those start is busybox's own `ip` and `ping`, whatever PATH says.
HOST_PROGRAMS=(dash timeout ip ethtool iperf3 ping)
XEN_PROGRAMS=(usr/lib/xen-4.17/bin/{xl,xenstored,xenconsoled,xen-init-dom0} usr/bin/xenstore)
XENSTORE_NAMES=(chmod exists list ls read rm watch write)

images_build() {
    if [ ! -f "$CACHE/dom0.cpio" ] || [ -n "$(find "$HERE"/{both,dom0,domu,lib} "$CACHE/fetched" -newer "$CACHE/dom0.cpio")" ]; then
        domu_base
        dom0_base
    fi
    local ours=$CACHE/root.ours
    rm -rf "$ours"
    mkdir -p "$ours/bin"
    local program
    for program in "${PROGRAMS[@]}"; do
        add_program "$ours" "$program" "bin/${program##*/}"
        strip "$ours/bin/${program##*/}"
    done
    # A domU's initrd lies in dom0's memory as a file; both get our programs.
    { cat "$CACHE/domu.cpio"; image_pack "$ours"; } >"$CACHE/domu.full.cpio"
    mkdir -p "$ours/boot"
    mv "$CACHE/domu.full.cpio" "$ours/boot/domu"
    { cat "$CACHE/dom0.cpio"; image_pack "$ours"; } >"$CACHE/initrd.cpio"
    rm -rf "$ours"
}

# add_program TREE FILE PLACE: the program, and the shared libraries it loads, from this machine or from Xen's packages.
add_program() {
    local tree=$1 file=$2 place=$3 library from=$CACHE/unpacked
    install -D -m 755 "$(readlink -f "$file")" "$tree/$place"
    { LD_LIBRARY_PATH=$from/usr/lib/xen-4.17/lib/x86_64-linux-gnu:$from/usr/lib/x86_64-linux-gnu:$from/lib/x86_64-linux-gnu \
        ldd "$file" 2>/dev/null || true; } | sed -n 's/.*=> *//; s/^[[:space:]]*//; s/ (0x.*//p' | { grep '^/' || true; } |
        while read -r library; do
            case $library in
            */ld-linux-x86-64.so.2) install -D -m 755 "$(readlink -f "$library")" "$tree/lib64/ld-linux-x86-64.so.2" ;;
            *) install -D -m 755 "$(readlink -f "$library")" "$tree/lib/x86_64-linux-gnu/${library##*/}" ;;
            esac
        done
}

# add_modules TREE MODULE...: with all that each needs.
add_modules() {
    local tree=$1 version modules name line file
    shift
    version=$(kernel_version)
    modules=lib/modules/$version
    for name in "$@"; do
        line=$(grep -E "(^|/)$name\.ko(\.xz)?:" "$CACHE/unpacked/$modules/modules.dep" | head -n 1)
        [ -n "$line" ] || die "the kernel has no module $name"
        for file in ${line/:/}; do
            install -D -m 644 "$CACHE/unpacked/$modules/$file" "$tree/$modules/$file"
        done
    done
    cp "$CACHE/unpacked/$modules"/modules.{builtin,order} "$tree/$modules/"
    busybox depmod -b "$tree" "$version"
}

# base_tree TREE: what both domains have.
base_tree() {
    local tree=$1 applet program name
    rm -rf "$tree"
    mkdir -p "$tree"/{bin,dev,proc,sys,tmp,run,etc,share,var/{lib,log}/xen}
    ln -s bin "$tree/sbin"
    ln -s /run "$tree/var/run"
    cp "$(command -v busybox)" "$tree/bin/busybox"
    for applet in $("$tree/bin/busybox" --list); do
        [ "$applet" = busybox ] || ln -s busybox "$tree/bin/$applet"
    done
    for program in "${HOST_PROGRAMS[@]}"; do
        rm -f "$tree/bin/$program"
        add_program "$tree" "$(command -v "$program")" "bin/$program"
    done
    ln -sf dash "$tree/bin/sh"
    add_program "$tree" "$CACHE/unpacked/usr/bin/xenstore" bin/xenstore
    for name in "${XENSTORE_NAMES[@]}"; do ln -s xenstore "$tree/bin/xenstore-$name"; done
    install -m 755 "$HERE"/both/* "$tree/bin/"
    echo 'root:x:0:0:root:/:/bin/sh' >"$tree/etc/passwd"
    echo 'root:x:0:' >"$tree/etc/group"
}

domu_base() {
    local tree=$CACHE/root.domu
    base_tree "$tree"
    add_modules "$tree" "${DOMU_MODULES[@]}"
    install -m 755 "$HERE/domu/init" "$tree/init"
    install -m 755 "$HERE/domu/agent" "$tree/bin/agent"
    image_pack "$tree" >"$CACHE/domu.cpio"
    rm -rf "$tree"
}

dom0_base() {
    local tree=$CACHE/root.dom0 program
    base_tree "$tree"
    add_modules "$tree" "${DOM0_MODULES[@]}"
    for program in "${XEN_PROGRAMS[@]}"; do
        add_program "$tree" "$CACHE/unpacked/$program" "bin/${program##*/}"
    done
    # xl runs its helpers from here.
    install -D -m 755 "$HERE/dom0/vif" "$tree/etc/xen/scripts/vif"
    echo 'autoballoon="off"' >"$tree/etc/xen/xl.conf"
    install -m 755 "$HERE/dom0/init" "$tree/init"
    install -D -m 644 "$HERE/dom0/lib.sh" "$tree/lib/case.sh"
    install -D -m 644 "$CACHE/vmlinux" "$tree/boot/vmlinux"
    image_pack "$tree" >"$CACHE/dom0.cpio.new"
    mv "$CACHE/dom0.cpio.new" "$CACHE/dom0.cpio"
    rm -rf "$tree"
}

image_pack() {
    (cd "$1" && find . | cpio -o -H newc -R 0:0 --quiet)
}
