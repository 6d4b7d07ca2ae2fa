# The demo in an emulated aarch64 machine: another instruction set, a weaker memory order, and a processor so slow that every limit in time is
# tried. Debian's arm64 kernel; the program as `.ci/run` makes it.
#
#   qemu-system-aarch64: init (busybox) - ringferry demo: switch, two guests, their network namespaces

case_add demo-aarch64 400 demo_aarch64 "the demo in an emulated aarch64 machine: five tests of checked traffic, of which none fails" aarch64_fetch

AARCH64=$WORK/aarch64

# aarch64_fetch: QEMU, and once the kernel and busybox, unpacked and not installed; apt knows of arm64 only here.
aarch64_fetch() {
    local lists=$AARCH64/apt kernel
    if ! command -v qemu-system-aarch64 >/dev/null; then
        echo "installing qemu-system-arm" >&2
        apt_update
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends qemu-system-arm >"$WORK/apt.log" 2>&1 ||
            die "apt-get install qemu-system-arm failed, see $WORK/apt.log"
    fi
    [ ! -f "$AARCH64/vmlinuz" ] || return 0
    rm -rf "$AARCH64"
    mkdir -p "$AARCH64/debs"
    apt_beside "$lists" bookworm -o Dir::State::Status=/dev/null -o APT::Architecture=arm64 -o APT::Architectures::=arm64
    kernel=$(apt_kernel linux-image-arm64)
    echo "fetching for aarch64: $kernel, busybox-static" >&2
    (cd "$AARCH64/debs" && apt-get "${APT[@]}" download "$kernel" busybox-static) || die "apt-get download failed"
    for deb in "$AARCH64"/debs/*.deb; do dpkg-deb -x "$deb" "$AARCH64/unpacked"; done
    mkdir -p "$AARCH64"/tree/{bin,dev,proc,sys,tmp,run,lib}
    cp "$AARCH64/unpacked/bin/busybox" "$AARCH64/tree/bin/"
    cp "$AARCH64"/unpacked/lib/modules/*/kernel/drivers/net/tun.ko "$AARCH64/tree/lib/"
    # Last: what is there is whole.
    cp "$AARCH64"/unpacked/boot/vmlinuz-* "$AARCH64/vmlinuz"
    rm -rf "$AARCH64/debs" "$AARCH64/unpacked" "$lists"
}

demo_aarch64() {
    local program
    program=${CARGO_TARGET_DIR:-$HERE/../../target}/aarch64-unknown-linux-gnu/quick/ringferry
    [ -x "$program" ] || fail "$program is missing: CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc RUSTFLAGS='-C target-feature=+crt-static' cargo build --profile quick --target aarch64-unknown-linux-gnu -p ringferry"
    cp -r "$AARCH64/tree" "$RUN/tree"
    cp "$program" "$RUN/tree/bin/ringferry"
    cat >"$RUN/tree/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
insmod /lib/tun.ko
uname -m
ringferry demo --seconds 2
echo "demo ended with $?"
poweroff -f
INIT
    chmod +x "$RUN/tree/init"
    (cd "$RUN/tree" && find . | cpio -o -H newc -R 0:0 --quiet | gzip -1) >"$RUN/initrd"
    echo "== qemu-system-aarch64"
    timeout 300 qemu-system-aarch64 -M virt -cpu cortex-a72 -smp 2 -m 1024 -accel tcg,thread=multi -nographic -no-reboot -net none \
        -kernel "$AARCH64/vmlinuz" -initrd "$RUN/initrd" -append "console=ttyAMA0 quiet panic=-1" </dev/null >"$LOG/console.log" 2>&1 ||
        fail "the machine did not end by itself, see console.log"
    tr -d '\r' <"$LOG/console.log" >"$LOG/console.txt"
    check "the machine is an aarch64" grep -qx 'aarch64' "$LOG/console.txt"
    check "no test of the demo has failed" grep -qx 'demo ended with 0' "$LOG/console.txt"
    check "packets passed with all features" grep -q 'vm-a, vm-b: .*MRG_RXBUF.*EVENT_IDX.*RING_PACKED' "$LOG/console.txt"
    note "$(sed -nE 's/^(TCP both at once|UDP MTU 1500, no offload) +([0-9.]+ [KMG]?bit\/s).*/\1: \2/p' "$LOG/console.txt" | paste -sd';')"
}
