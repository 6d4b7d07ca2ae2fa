# A guest: stock Debian kernel under QEMU's emulated CPU (no KVM needed), one virtio-net device on a vhost-user socket.
# The host asks, the agent in the guest answers, through a 9p share (guest/agent).


# The emulator and its data, and what its virtio-net-pci is given always.
# vectors=0: QEMU 7.2 without KVM crashes at DRIVER_OK when a vhost-user device has MSI-X vectors.
QEMU=(qemu-system-x86_64)
QEMU_NIC=,vectors=0

GUEST_COMMAND_LINE="console=ttyS0 quiet mitigations=off tsc=reliable no_timer_check nokaslr random.trust_cpu=on net.ifnames=0"

# vm_start NAME SOCKET CHARDEV_OPTIONS [DEVICE_OPTIONS]: returns at once. Options begin with a comma: ",server=on", ",mrg_rxbuf=off".
# VM_OPTIONS are words for QEMU itself, VM_KERNEL_OPTIONS for the guest's kernel. The last byte of the device's MAC address is the NAME's digits. With QUEUES=2, two queue pairs and a CPU for each, unless CPUS says
# how many there are. With UNSHARED=1 nobody else can have the guest's memory. With NETBOOT=1 the firmware has to get the kernel through the device (netboot.sh).
vm_start() {
    local name=$1 socket=$2 chardev=$3 device=${4:-} share=$LOG/$1.share pairs=${QUEUES:-1}
    local cpus=${CPUS:-$pairs}
    local kernel=(-kernel "$KERNEL" -initrd "$INITRD" -append "$GUEST_COMMAND_LINE ${VM_KERNEL_OPTIONS:-}") rom=,romfile=
    [ "$pairs" = 1 ] || device=,mq=on$device
    [ -z "${NETBOOT:-}" ] || kernel=() rom=,bootindex=0
    mkdir -p "$share"
    # shellcheck disable=SC2206 # words of a command line
    local options=(${VM_OPTIONS:-})
    local memory="memory-backend-memfd,id=m0,size=256M,share=on"
    [ -z "${UNSHARED:-}" ] || memory="memory-backend-ram,id=m0,size=256M"
    # qemu64, and not max: under emulation it is twice as fast. Shared guest memory from a memfd needs no set-up on the host.
    # maxcpus: for a machine that can only ever have one processor, QEMU's emulation leaves out the guest's memory barriers, as though
    # nobody shared its memory. With one, a call was lost in about one second of traffic both ways in thirty, and the guest's queue stood still.
    # romfile= leaves out the boot ROM where the kernel is given.
    # No -no-reboot: a reboot of the guest must reset the device under a running ringferry. panic=-1 would loop, so a panic stops.
    spawn "$name" "${QEMU[@]}" -name "$name" -machine q35 -accel tcg,thread=multi -cpu qemu64 -smp "$cpus,maxcpus=$((cpus < 2 ? 2 : cpus))" -m 256 \
        -object "$memory" -numa node,memdev=m0 \
        -nodefaults -no-user-config -display none -action panic=shutdown \
        "${kernel[@]}" "${options[@]}" \
        -serial "file:$LOG/$name.console" \
        -fsdev "local,id=share,path=$share,security_model=none" -device virtio-9p-pci,fsdev=share,mount_tag=share \
        -chardev "socket,id=c0,path=$socket$chardev" -netdev "vhost-user,id=n0,chardev=c0,queues=$pairs" \
        -device "virtio-net-pci,netdev=n0,mac=52:54:00:00:00:$(printf %02x "${name//[^0-9]/}")$QEMU_NIC$rom$device"
}

# vm_wait NAME [BOOT]: until the agent runs after the BOOTth boot.
vm_wait() {
    local name=$1 boot=${2:-1}
    wait_for 180 vm_booted "$name" "$boot" || fail "$name did not boot within 180 s (see $name.console)"
    alive "$name" || fail "QEMU ended: $(tail -n 1 "$LOG/$name.log")"
}

vm_booted() {
    ! alive "$1" || { [ -f "$LOG/$1.share/boots" ] && [ "$(wc -l <"$LOG/$1.share/boots")" -ge "$2" ]; }
}

# guest NAME SECONDS COMMAND...: runs it in the guest's shell, prints what it printed, returns its exit code.
guest() {
    local name=$1 limit=$2 share=$LOG/$1.share n code command
    shift 2
    # Quoted for any POSIX shell.
    command=${*//\'/\'\\\'\'}
    n=$(guest_ask "$name" "timeout -s KILL $limit sh -c '$command'")
    if ! wait_for $((limit + 5)) guest_answered "$name" "$n"; then
        echo "$name did not answer within $((limit + 5)) s: $*"
        return 124
    fi
    cat "$share/$n.out"
    [ -f "$share/$n.rc" ] || { echo "$name: QEMU ended"; return 125; }
    read -r code <"$share/$n.rc"
    return "$code"
}

guest_answered() {
    ! alive "$1" || [ -f "$LOG/$1.share/$2.rc" ]
}

# guest_ask NAME COMMAND: hands it over, prints its number, does not wait. The number is the count of files, as callers are subshells.
guest_ask() {
    local share=$LOG/$1.share n
    n=$(printf %04d "$(find "$share" -name '*.taken' -o -name '*.cmd' | wc -l)")
    echo "$2" >"$share/$n.new"
    mv "$share/$n.new" "$share/$n.cmd"
    echo "$n"
}

# vm_up NAME ADDRESS [MTU]: the guest's end of the network of ns_up. Fails when the guest has no working NIC.
vm_up() {
    local name=$1 address=$2
    guest "$name" 10 "echo 0 >/proc/sys/net/ipv6/conf/eth0/accept_dad;${3:+ip link set eth0 mtu $3 &&} ip link set eth0 up &&
        ip addr add 10.9.0.$address/24 dev eth0 && ip addr add fd09::$address/64 dev eth0 nodad" || fail "$name has no network device"
    wait_for 5 guest "$name" 5 'grep -q 1 /sys/class/net/eth0/carrier' || fail "$name: no carrier"
    guest "$name" 5 'cat /sys/class/net/eth0/device/features; ethtool -k eth0 | grep -v fixed' >"$LOG/$name.features" || true
}

# vm_has_features NAME BIT...: negotiated by the guest's driver; a bit with a minus in front must be off.
vm_has_features() {
    local name=$1 bits bit want
    shift
    bits=$(head -n 1 "$LOG/$name.features")
    for bit in "$@"; do
        want=1
        [ "${bit#-}" = "$bit" ] || want=0
        [ "${bits:${bit#-}:1}" = "$want" ] || fail "$name: virtio feature bit ${bit#-} is not $want ($bits)"
    done
}

# vm_off NAME: the guest powers off, QEMU ends by itself.
vm_off() {
    local name=$1
    guest_ask "$name" 'poweroff -f' >/dev/null
    wait_for 30 not_running "${PID[$name]}" || fail "$name did not power off"
    wait "${PID[$name]}" || fail "$name: QEMU exit code $?"
    unset "PID[$name]"
}
