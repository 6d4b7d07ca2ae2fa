# `cargo metadata` documents (slurped) in, one line of summary out; every problem is an error.
# $allowed: licences; $registry: the one source beside the workspace itself.

# Whether an SPDX expression can be satisfied with allowed licences. Each licence becomes 1 or 0, then the operators are worked off:
# AND binds stronger than OR, as SPDX annex D says; "/" is how crates.io once wrote OR. A licence may have an exception behind WITH.
def satisfied:
    gsub("\\s+WITH\\s+"; "~") | gsub("/"; " OR ") | gsub("(?<p>[()])"; " \(.p) ")
    | [splits("\\s+") | select(. != "") | if . == "AND" then "&" elif . == "OR" then "|" elif . == "(" or . == ")" then .
        elif (gsub("~"; " WITH ") as $licence | $allowed | index($licence)) then "1" else "0" end]
    | join("")
    | until(test("[01]&[01]|\\([01|]+\\)") | not;
        if test("[01]&[01]") then gsub("(?<a>[01])&(?<b>[01])"; if .a + .b == "11" then "1" else "0" end)
        else gsub("\\((?<inside>[01|]+)\\)"; if (.inside | contains("1")) then "1" else "0" end) end)
    | test("^[01](\\|[01])*$") and contains("1");

[.[].packages[]] | unique_by(.id)
| map(
    (select(.license == null or (.license | satisfied | not))
        | "\(.name) \(.version): licence \(.license // "not stated") is not allowed"),
    (select(.source != null and .source != $registry) | "\(.name) \(.version): comes from \(.source)"),
    (select(.source == null) as $ours | $ours.dependencies[] | select(.req == "*" and .path == null)
        | "\($ours.name): requires any version of \(.name)")
) as $problems
| if length == 0 then "no packages: cargo metadata failed\n" | halt_error
  elif $problems == [] then "\(length) packages, all with allowed licences" else ($problems | join("\n") + "\n" | halt_error) end
