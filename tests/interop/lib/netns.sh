# Network namespaces with a prefix no one else uses. Their taps go with them.

# netns_add NAME...: loopback up, no IPv6 address detection delay, ping allowed.
netns_add() {
    local name
    for name in "$@"; do
        ip netns add "$PREFIX$name"
        ip -n "$PREFIX$name" link set lo up
        # A new address is usable at once, and the kernel's own IPv6 chatter does not disturb counts.
        ip netns exec "$PREFIX$name" sysctl -qw net.ipv6.conf.default.accept_dad=0 net.ipv6.conf.default.router_solicitations=0
    done
}

# in_ns NAME COMMAND...
in_ns() {
    local name=$1
    shift
    ip netns exec "$PREFIX$name" "$@"
}

# ns_up NAME DEVICE ADDRESS [MTU]: 10.9.0.ADDRESS/24 and fd09::ADDRESS/64 and a MAC address that survives a restart of whoever made the tap.
ns_up() {
    local name=$PREFIX$1 device=$2 address=$3 mtu=${4:-}
    ip -n "$name" link set "$device" down
    ip -n "$name" link set "$device" address "02:00:00:00:09:$(printf %02x "$address")"
    [ -z "$mtu" ] || ip -n "$name" link set "$device" mtu "$mtu"
    ip -n "$name" link set "$device" up
    ip -n "$name" addr replace "10.9.0.$address/24" dev "$device"
    ip -n "$name" addr replace "fd09::$address/64" dev "$device" nodad
}

# netns_remove PREFIX: with everything that runs in them.
netns_remove() {
    local name pids
    for name in $(ip netns list | cut -d' ' -f1 | grep "^$1" || true); do
        pids=$(ip netns pids "$name")
        # shellcheck disable=SC2086 # one word per process
        [ -z "$pids" ] || kill -KILL $pids 2>/dev/null || true
        ip netns delete "$name" || true
    done
}
