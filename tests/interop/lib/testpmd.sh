# DPDK's testpmd, as driver (net_virtio_user) or as device (net_vhost) of a vhost-user socket.
#
# --no-huge works for both in DPDK 22.11: its memory is then one memfd, which net_virtio_user shares with the device, and net_vhost maps
# the driver's memory anyway. So no huge pages are reserved and nothing of the host is changed. (--in-memory excludes --no-huge.)

declare -A TESTPMD_COMMANDS=()

# testpmd_start NAME VDEV... -- [ARGUMENT...]: returns when it forwards. Not interactive: it prints counters each second and ends on
# SIGTERM. With INTERACTIVE=1 it takes commands: testpmd_tell.
# With TESTPMD_IN=NAME it runs in that namespace. With SIMD=512 DPDK may use AVX-512, which its packed vectorized path needs and which is off by default.
testpmd_start() {
    local name=$1 devices=() last mode=(--stats-period 1) STDIN='' commands
    shift
    if [ -n "${INTERACTIVE:-}" ]; then
        mode=(-i --auto-start)
        STDIN=$RUN/$name.commands
        mkfifo "$STDIN"
        # Open for reading and writing: opening does not wait for the other side, and testpmd sees no end of file.
        exec {commands}<>"$STDIN"
        TESTPMD_COMMANDS[$name]=$commands
    fi
    while [ "$1" != -- ]; do devices+=(--vdev "$1"); shift; done
    shift
    last=$(($(nproc) - 1))
    # One worker. Both threads may run on any CPU: ringferry, the kernels behind the taps and testpmd's endless polling share two.
    RUNTIME_DIRECTORY=$RUN spawn "$name" ${TESTPMD_IN:+ip netns exec "$PREFIX$TESTPMD_IN"} stdbuf -oL dpdk-testpmd --lcores "0@(0-$last),1@(0-$last)" --no-pci --no-huge -m 192 \
        --no-telemetry --file-prefix="$name" --log-level='pmd.net.virtio.*:info' ${SIMD:+--force-max-simd-bitwidth="$SIMD"} "${devices[@]}" -- \
        --nb-cores=1 --total-num-mbufs=16384 --no-flush-rx "${mode[@]}" "$@"
    wait_for 15 testpmd_runs "$name" || fail "$name did not start within 15 s"
    alive "$name" || fail "$name ended: $(tail -n 1 "$LOG/$name.log")"
}

testpmd_runs() {
    ! alive "$1" || said "$1" | grep 'packets/burst'
}

# testpmd_tell NAME COMMAND...: the last of them must be `start`; returns when it forwards again.
testpmd_tell() {
    local name=$1 before
    shift
    before=$(said "$name" | grep -c 'packets/burst' || true)
    printf '%s\n' "$@" >&"${TESTPMD_COMMANDS[$name]}"
    wait_for 15 testpmd_started_after "$name" "$before" || fail "$name does not forward within 15 s of: $*"
    alive "$name" || fail "$name ended: $(tail -n 1 "$LOG/$name.log")"
}

testpmd_started_after() {
    ! alive "$1" || [ "$(said "$1" | grep -c 'packets/burst')" -gt "$2" ]
}

# testpmd_path NAME DIRECTION WORDS: net_virtio_user said it uses this path on both of its ports ("packed ring standard", "inorder", "vectorized", ...).
# It falls back without a word to the user when a wish cannot be met.
testpmd_path() {
    local path
    path=$(said "$1" | sed -n "s/.*virtio: using \(.*\) $2 path on port [01]$/\1/p" | sort -u)
    [ "$path" = "$3" ] || fail "$1: $2 path '$path' in place of '$3'"
}

# testpmd_agreed NAME BIT...: what net_vhost said was negotiated last, on each socket; a bit with a minus in front must be off.
testpmd_agreed() {
    local name=$1 bits bit want seen=0
    shift
    # Two ports, so the last two lines.
    for bits in $(said "$name" | sed -n 's/.* negotiated Virtio features: //p' | tail -n 2); do
        seen=$((seen + 1))
        for bit; do
            want=1
            [ "${bit#-}" = "$bit" ] || want=0
            [ $((bits >> ${bit#-} & 1)) = $want ] || fail "$name: virtio feature bit ${bit#-} is not $want ($bits)"
        done
    done
    [ $seen = 2 ] || fail "$name agreed on features with $seen drivers"
}
