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

# apt_beside FOLDER SUITE OPTION...: APT becomes the options of an apt that knows this suite alone and keeps all of its own in FOLDER.
apt_beside() {
    local folder=$1
    mkdir -p "$folder/state/lists/partial" "$folder/cache/archives/partial"
    echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR $2 main" >"$folder/sources.list"
    APT=(-qq -o "Dir::Etc::SourceList=$folder/sources.list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$folder/state/lists"
        -o "Dir::Cache=$folder/cache" -o APT::Sandbox::User=root "${@:3}")
    apt-get "${APT[@]}" update >"$WORK/apt.log" 2>&1 || die "apt-get update failed, see $WORK/apt.log"
}

# apt_kernel PACKAGE: the kernel's own package that this one stands for, by the apt of apt_beside.
apt_kernel() {
    local kernel
    kernel=$(apt-cache "${APT[@]}" depends "$1" | sed -n 's/.*Depends: \(linux-image-[0-9][^ :]*\).*/\1/p' | head -n 1)
    [ -n "$kernel" ] || die "there is no $1"
    echo "$kernel"
}
