# What a case uses, in dom0. A command that fails ends the case; the last line says why.

uptime_of() {
    cut -d' ' -f1 /proc/uptime
}

# step TEXT: for the log.
step() {
    echo "== $(uptime_of) $*"
}

# fail WHY: ends the case.
fail() {
    echo "$*" >/share/why
    exit 1
}

# note TEXT: a line in the report.
note() {
    echo "$*" >>/share/notes
}

# check WHAT COMMAND...: the command must succeed.
check() {
    what=$1
    shift
    step "$what: $*"
    "$@" || fail "$what"
}

# wait_for SECONDS COMMAND...: until the command succeeds.
wait_for() {
    tries=$(($1 * 10))
    shift
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        sleep 0.1
    done
}

# domu_create NAME [VIF] [KERNEL_ARGUMENTS]: makes a domain and waits until its agent answers. VIF as in xl.cfg; by default none.
domu_create() {
    step "create $1"
    {
        echo "name='$1'"
        echo "type='${TYPE:-pv}'"
        echo "kernel='/boot/vmlinux'"
        echo "ramdisk='/boot/domu'"
        echo "extra='console=hvc0 quiet loglevel=4 net.ifnames=0 ${3:-}'"
        echo "memory=${MEMORY:-192}"
        echo "vcpus=${VCPUS:-1}"
        echo "vif=[${2:+'$2'}]"
        echo "on_crash='destroy'"
        echo "on_reboot='destroy'"
    } >"/tmp/$1.cfg"
    xl create -q "/tmp/$1.cfg" || fail "xl create $1"
    wait_for 60 xenstore-exists "/local/domain/$(domu_id "$1")/data/ready" || fail "$1 did not come up"
    step "$1 is up"
}

domu_id() {
    xl domid "$1"
}

# domu NAME SECONDS COMMAND...: runs it in the domain's shell, prints the end of what it printed, returns its exit code.
domu() {
    node=/local/domain/$(domu_id "$1")/data
    limit=$2
    shift 2
    number=$(($(xenstore-read "$node/number") + 1))
    xenstore-write "$node/command" "$*" "$node/number" "$number"
    wait_for "$limit" domu_answered "$node" "$number" || { echo "no answer within $limit s: $*"; return 124; }
    xenstore-read -R "$node/output"
    return "$(xenstore-read "$node/code")"
}

domu_answered() {
    [ "$(xenstore-read "$1/answered")" = "$2" ]
}

# domu_start NAME COMMAND...: as above, in the background of the domain; its output is /tmp/background there.
domu_start() {
    name=$1
    shift
    domu "$name" 10 "($*) >/tmp/background 2>&1 </dev/null & echo \$! >/tmp/background.pid"
}

domu_destroy() {
    step "destroy $1"
    xl destroy "$1" || fail "xl destroy $1"
}

# grants_in_use DOMAIN: how many of its pages others have mapped, by Xen's own count, without those that every domain has: the
# store's and the console's.
grants_in_use() {
    xl dmesg -c >/dev/null
    xl debug-keys g
    xl dmesg | awk -v domain="d$1" '
        /grant-table for remote/ { of = $0; sub(/.*remote */, "", of); sub(/[^d0-9].*/, "", of) }
        /^\(XEN\) \[0x/ && of == domain && $2 != "[0x000]" && $2 != "[0x001]" { count++ }
        END { print count + 0 }'
}
