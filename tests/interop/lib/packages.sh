# Debian packages: installs what `packages` lists and is missing. One `apt-get update` at most, and none when nothing is missing.

MIRROR=${DEBIAN_MIRROR:-http://deb.debian.org/debian}

# apt_begin, apt_end: around whatever calls apt, which does not wait for itself everywhere; the two suites may begin side by side.
apt_begin() {
    exec {APT_LOCK}>/run/ringferry-interop.apt
    flock "$APT_LOCK"
}

apt_end() {
    exec {APT_LOCK}>&-
}

packages_install() {
    local name missing=()
    while read -r name; do
        dpkg-query -W -f='${Status}' "$name" 2>/dev/null | grep -q 'install ok installed' || missing+=("$name")
    done < <(sed 's/#.*//; s/[[:space:]]*$//; /^$/d' "$HERE/packages")
    if [ ${#missing[@]} -gt 0 ]; then
        echo "installing: ${missing[*]}" >&2
        apt_update
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$WORK/apt.log" 2>&1 ||
            die "apt-get install failed, see $WORK/apt.log"
    fi
}

# At most one update per run; the lists on a fresh container are empty.
apt_update() {
    [ -z "${APT_UPDATED:-}" ] || return 0
    apt-get update -qq >"$WORK/apt.log" 2>&1 || die "apt-get update failed, see $WORK/apt.log"
    APT_UPDATED=1
}
