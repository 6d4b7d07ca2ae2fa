# Offloads that the two ends do not share: what the switch does in their place, with every byte checked by the ends' own stacks.
#
#   qemu-offloads-tap-*    a Linux guest whose device lacks some of them, the host's kernel with all of them behind a tap
#   qemu-offloads-pair     a Linux guest with none of them, another with all of them

# Linux's driver wants GUEST_CSUM for guest_tso*, and CSUM for host_tso*.
OFFLOADS_SENDS_NOTHING=csum=off,gso=off,host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off
OFFLOADS_TAKES_NOTHING=guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off

# offloads_case NAME QEMUOPTIONS "BITS" TOGUEST FROMGUEST "ABOUT": BITS as vm_has_features takes them. TOGUEST is what `ctl explain` says that TCP
# over IPv4 has done to it on the way from the tap to the guest, FROMGUEST the same the other way: segments/checksums.
declare -A OFFLOADS_OPTIONS=() OFFLOADS_BITS=() OFFLOADS_TO=() OFFLOADS_FROM=()
offloads_case() {
    local name=qemu-offloads-tap-$1
    case_add "$name" 240 qemu_offloads_tap "$6"
    OFFLOADS_OPTIONS[$name]=$2 OFFLOADS_BITS[$name]=$3 OFFLOADS_TO[$name]=$4 OFFLOADS_FROM[$name]=$5
}

offloads_case none "$OFFLOADS_SENDS_NOTHING,$OFFLOADS_TAKES_NOTHING" "-0 -1 -7 -8 -11 -12" cut/computed merged/verified \
    "a guest without any offload and the host with all: cut and summed one way, merged the other"
offloads_case takes-nothing "$OFFLOADS_TAKES_NOTHING" "0 -1 -7 -8 11 12" cut/computed unsegmented/left-out \
    "a guest that only sends with offloads"
offloads_case sends-nothing "$OFFLOADS_SENDS_NOTHING" "-0 1 7 8 -11 -12" unsegmented/left-out merged/verified \
    "a guest that only receives with offloads"
offloads_case csum "host_tso4=off,host_tso6=off,host_ecn=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,gso=off" "0 1 -7 -8 -11 -12" \
    cut/left-out merged/left-out "checksums only"
offloads_case tso4 "host_tso6=off,guest_tso6=off" "0 1 7 -8 11 -12" unsegmented/left-out unsegmented/left-out \
    "segmentation for IPv4 only: IPv6 is cut one way and merged the other"
offloads_case none-small "mrg_rxbuf=off,$OFFLOADS_SENDS_NOTHING,$OFFLOADS_TAKES_NOTHING" "-0 -1 -7 -11 -15" cut/computed merged/verified \
    "the same as none, with receive buffers of one frame"

# explained PORT FROM TO KIND: segments/checksums, as `ctl explain PORT` says.
explained() {
    rf_ctl switch explain "$1" --json | jq -r --arg from "$2" --arg to "$3" --arg kind "$4" \
        '.ways[] | select(.from == $from and .to == $to) | .traffic[] | select(.kind == $kind) | "\(.segments)/\(.checksums)"'
}

# explained_as PORT FROM TO KIND WANTED
explained_as() {
    local said
    said=$(explained "$1" "$2" "$3" "$4")
    [ "$said" = "$5" ] || fail "ctl explain: $4 from $2 to $3 is $said in place of $5"
}

# port_counter PORT COUNTER
port_counter() {
    rf_ctl switch show --json | jq -r --arg port "$1" --arg counter "$2" '.ports[] | select(.name == $port) | .counters[$counter]'
}

# counted PORT COUNTER yes|no: whether it has counted anything.
counted() {
    local count
    count=$(port_counter "$1" "$2")
    case $3 in
    yes) [ "$count" -gt 0 ] || fail "$2 of port $1 is 0" ;;
    no) [ "$count" = 0 ] || fail "$2 of port $1 is $count" ;;
    esac
    note "$2 of $1: $count"
}

# offloads_traffic END ADDRESS ADDRESS6: every size and protocol that takes another way.
offloads_traffic() {
    ping_check "$1" "$2" -s 1472 -M 'do'
    ping_check "$1" "$2" -s 20001
    ping_check "$1" "$3" -s 20001
    traffic_check "$1" "$2" 1 "${MODES[@]}"
    traffic_check "$1" "$3" 1 tcp-both udp
}

qemu_offloads_tap() {
    local bits software=yes merged=yes
    read -ra bits <<<"${OFFLOADS_BITS[$CASE]}"
    qemu_bed client '' ",${OFFLOADS_OPTIONS[$CASE]}"
    ns_up a rf0 1
    vm_wait vm2
    vm_up vm2 2
    vm_has_features vm2 "${bits[@]}"
    rf_ctl switch explain vm2
    explained_as vm2 rf0 vm2 "TCP over IPv4" "${OFFLOADS_TO[$CASE]}"
    explained_as vm2 vm2 rf0 "TCP over IPv4" "${OFFLOADS_FROM[$CASE]}"
    traffic_server ns:a
    offloads_traffic vm:vm2 10.9.0.1 fd09::1
    iperf_server a
    iperf_check guest-to-host vm:vm2 10.9.0.1
    iperf_check host-to-guest vm:vm2 10.9.0.1 -R
    iperf_check udp-guest-to-host vm:vm2 10.9.0.1 -u -b 50M
    iperf_check udp-host-to-guest vm:vm2 10.9.0.1 -u -b 50M -R
    # What was said is what was done. With IPv6 cut or merged, so is something of every case.
    [[ ${OFFLOADS_TO[$CASE]} != unsegmented/* || $CASE = *-tso4 ]] || software=no
    [[ ${OFFLOADS_FROM[$CASE]} != unsegmented/* || $CASE = *-tso4 ]] || merged=no
    # Most hosts' kernels are older than the guests' use of UDP segmentation, so only what must be is looked at.
    [ $software = no ] || counted vm2 tx_software yes
    [ $merged = no ] || counted rf0 tx_coalesced yes
    counted rf0 tx_software no
    vm_off vm2
    rf_stop switch
}

case_add qemu-offloads-pair 300 qemu_offloads_pair "a guest without any offload and one with all of them, through one switch"

qemu_offloads_pair() {
    netns_add a
    rf_switch switch a "vhost-user:$RUN/vm2.sock" "vhost-user:$RUN/vm3.sock" tap:rf0
    vm_start vm2 "$RUN/vm2.sock" ,reconnect=1 ",$OFFLOADS_SENDS_NOTHING,$OFFLOADS_TAKES_NOTHING"
    vm_start vm3 "$RUN/vm3.sock" ,reconnect=1
    ns_up a rf0 1
    vm_wait vm2
    vm_wait vm3
    vm_up vm2 2
    vm_up vm3 3
    vm_has_features vm2 -0 -1 -7 -8 -11 -12
    vm_has_features vm3 "${QEMU_DEFAULT_FEATURES[@]}"
    rf_ctl switch explain vm2
    explained_as vm2 vm2 vm3 "TCP over IPv4" merged/verified
    explained_as vm2 vm3 vm2 "TCP over IPv4" cut/computed
    traffic_server vm:vm3
    offloads_traffic vm:vm2 10.9.0.3 fd09::3
    guest vm3 5 'iperf3 -s >/dev/null 2>&1 & sleep 0.5'
    iperf_check none-to-all vm:vm2 10.9.0.3
    iperf_check all-to-none vm:vm2 10.9.0.3 -R
    counted vm2 tx_software yes
    counted vm3 tx_coalesced yes
    counted vm3 tx_software no
    vm_off vm2
    vm_off vm3
    rf_stop switch
}
