# The same guest with features of its device turned off: each is a different path of the device half, and each must carry every byte.
# Each case checks in the guest that the feature really is off, so that a new default of QEMU cannot make it pass without a test.

# feature_case NAME QEMUOPTIONS "BITS" "ABOUT": BITS as vm_has_features takes them.
declare -A FEATURE_OPTIONS=() FEATURE_BITS=()
feature_case() {
    case_add "qemu-$1" 150 qemu_feature "$4"
    FEATURE_OPTIONS[qemu-$1]=$2
    FEATURE_BITS[qemu-$1]=$3
}

NO_GUEST_OFFLOADS=guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off
NO_CSUM=csum=off,gso=off,host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off
# Linux refuses a device without a control queue that has features which need one, so these go together.
NO_CTRL=ctrl_vq=off,ctrl_rx=off,ctrl_rx_extra=off,ctrl_vlan=off,ctrl_mac_addr=off,ctrl_guest_offloads=off,guest_announce=off,mq=off

feature_case no-mergeable mrg_rxbuf=off "-15 7 32" "receive buffers of 64 KiB in chains (no MRG_RXBUF, GUEST_TSO on)"
feature_case small-buffers "mrg_rxbuf=off,$NO_GUEST_OFFLOADS" "-15 -7 -8 32" "receive buffers of one frame (no MRG_RXBUF, no GUEST_TSO)"
feature_case no-event-idx event_idx=off "-29 28" "notification flags in place of event indices"
feature_case no-indirect indirect_desc=off "-28 29" "chains in the ring itself"
feature_case no-csum "$NO_CSUM,guest_csum=off,$NO_GUEST_OFFLOADS" "-0 -1 -7 -11 15" "no checksum or segmentation offload either way"
feature_case no-guest-csum "guest_csum=off,$NO_GUEST_OFFLOADS" "0 -1 -7 11" "the guest sends with offloads and receives without"
feature_case nothing "mrg_rxbuf=off,event_idx=off,indirect_desc=off,status=off,$NO_CTRL,$NO_CSUM,guest_csum=off,$NO_GUEST_OFFLOADS" \
    "-0 -1 -7 -11 -15 -16 -17 -28 -29 32" "everything off but VERSION_1"
feature_case packed-no-event-idx "packed=on,event_idx=off" "34 -29 28 15" "packed rings: notification flags in place of descriptor events"
feature_case packed-no-indirect "packed=on,indirect_desc=off,mrg_rxbuf=off" "34 -28 29 -15" "packed rings: chains in the ring itself, no MRG_RXBUF"
feature_case legacy "disable-modern=on,disable-legacy=off" "-32 15" "a legacy device: no VERSION_1"

qemu_feature() {
    local bits
    read -ra bits <<<"${FEATURE_BITS[$CASE]}"
    qemu_bed client '' ",${FEATURE_OPTIONS[$CASE]}"
    ns_up a rf0 1
    vm_wait vm2
    vm_up vm2 2
    vm_has_features vm2 "${bits[@]}"
    ping_check ns:a 10.9.0.2 -s 1472 -M 'do'
    traffic_server ns:a
    traffic_check vm:vm2 10.9.0.1 1 "${MODES[@]}"
    vm_off vm2
    rf_stop switch
}
