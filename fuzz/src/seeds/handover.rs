//! Scenarios for the state that is handed over.

use super::Seed;
use crate::ring::Reached;
use crate::script::Field;

/// What the first program wrote of a switch with a connected front end and a tap, without what a test of the switch reads as well.
const HELLO: &str = r#"{"format":1,"needs":["tap","vhost-user"],"program":"0.1.0","config":"[switch]\nworkers = 2\n\n[[port]]\nkind = \"tap\"\nname = \"rf0\"\ntap = \"rf0\"\nvlan = 10\n","file":{"path":"/rf.toml","ports":["rf0"],"settings":"","drop_ins":{"rf0":"/rf.d/a.toml"}},"workers":2,"began":5,"started":6,"watchdog":7,"sandboxed":true}"#;
const DRAFT: &str = r#"{"entries":[{"name":"rf0","state":{"tap":{"queues":[0],"interface":"rf0","index":3}},"descriptors":1},{"name":"x","state":{"xdp":{"sockets":[0,1,2],"index":4,"several":false}},"descriptors":3,"events":[null,5]},{"name":"b","state":"xen-vif"}],"numbers":{"rf0":1,"b":2},"addresses":{"at":0,"bytes":32},"manager":true,"keeps":true}"#;
const FINAL: &str = r#"{"entries":[{"name":"rf0","positions":[1,null]}],"ports":{"rf0":{"number":1,"owners":[0,1],"counters":{"calls":3},"drops":{"vlan":1},"pairs":[[1,2]],"buckets":{"rate_in":5},"flows":{"at":32,"bytes":32}}},"addresses":{"at":0,"bytes":32},"workers":[{"counters":[1],"fdb":[1,2],"waiting":{"at":64,"bytes":108}}],"links_down":["rf0"]}"#;

/// Two addresses behind port 1, two flows, and a frame of 60 bytes that waits.
fn bulk() -> Vec<u8> {
    let mut bulk = Vec::new();
    for last in [1, 2] {
        bulk.extend([10, 0, 0x52, 0x54, 0, 0, 0, last, 1, 0, 0, 0, 7, 0, 0, 0]);
    }
    bulk.extend([1; 32]);
    bulk.extend([1, 0, 1, 0, 60, 0, 0, 0]);
    bulk.extend([0; 40]);
    bulk.extend([3; 60]);
    bulk
}

pub(super) fn seeds() -> Vec<Seed> {
    let cut = |text: &'static str| &text[..text.len() - 3];
    let all = [
        ("hello", HELLO, 1),
        ("draft", DRAFT, 1 + 2 + 1),
        ("final", FINAL, 1 + 2 + 2 + 1),
        ("cut", cut(DRAFT), 0),
    ];
    let seed = |(name, text, chains): (&'static str, &str, usize)| {
        let mut bytes = Vec::new();
        (text.len() as u16).put(&mut bytes);
        bytes.extend(text.as_bytes());
        bytes.extend(bulk());
        Seed { target: "handed_state", name, bytes, reaches: Reached { chains, ..Reached::default() } }
    };
    all.map(seed).into()
}
