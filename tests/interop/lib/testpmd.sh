# DPDK's testpmd, as driver (net_virtio_user) or as device (net_vhost) of a vhost-user socket.
#
# --no-huge works for both in DPDK 22.11: its memory is then one memfd, which net_virtio_user shares with the device, and net_vhost maps
# the driver's memory anyway. So no huge pages are reserved and nothing of the host is changed. (--in-memory excludes --no-huge.)

# testpmd_start NAME VDEV... -- [ARGUMENT...]: returns when it forwards. Not interactive: it prints counters each second and ends on SIGTERM.
testpmd_start() {
    local name=$1 devices=() last
    shift
    while [ "$1" != -- ]; do devices+=(--vdev "$1"); shift; done
    shift
    last=$(($(nproc) - 1))
    # One worker. Both threads may run on any CPU: ringferry, the kernels behind the taps and testpmd's endless polling share two.
    RUNTIME_DIRECTORY=$RUN spawn "$name" stdbuf -oL dpdk-testpmd --lcores "0@(0-$last),1@(0-$last)" --no-pci --no-huge -m 192 \
        --no-telemetry --file-prefix="$name" "${devices[@]}" -- --nb-cores=1 --total-num-mbufs=16384 --no-flush-rx --stats-period 1 "$@"
    wait_for 15 testpmd_runs "$name" || fail "$name did not start within 15 s"
    alive "$name" || fail "$name ended: $(tail -n 1 "$LOG/$name.log")"
}

testpmd_runs() {
    ! alive "$1" || grep -q 'packets/burst' "$LOG/$1.log"
}
