# The list of cases. A file in cases/ adds its own: case_add NAME LIMIT FUNCTION "what it shows" [COMMAND...], where the command fetches what only
# such cases need.

CASE_NAMES=()
declare -A CASE_LIMIT=() CASE_FUNCTION=() CASE_ABOUT=() CASE_FETCH=()

# LIMIT in seconds: five times and more what the case takes on an idle machine, so that only a hang runs into it.
case_add() {
    CASE_NAMES+=("$1")
    CASE_LIMIT[$1]=$2
    CASE_FUNCTION[$1]=$3
    CASE_ABOUT[$1]=$4
    CASE_FETCH[$1]=${*:5}
}

case_function() {
    [ -n "${CASE_FUNCTION[$1]:-}" ] || { echo "no such case: $1" >&2; return 1; }
    echo "${CASE_FUNCTION[$1]}"
}
