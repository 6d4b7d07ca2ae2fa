//! Scenarios for the privileged helper.

use super::Seed;
use crate::helper::{
    CHANGED, CONNECT, FLOOD, GONE, KEEP, KEEP_LONG, KEEP_TEXT, LINK, LISTENS, Message, NO_SOCKET, NONSENSE,
    PEER, RAW, TIDY,
};
use crate::ring::Reached;
use crate::script::Field;

/// Numbers of ports in `NAMES`.
const VM0: u8 = 0;
const VM1: u8 = 1;
const RF0: u8 = 2;
/// Numbers of rules in `RULES`, and of keys in `KEYS`.
const VLAN: u8 = 0;
const NO_VLAN: u8 = 1;
const TRUNK: u8 = 2;
const ISOLATED: u8 = 4;
const STATIC: u8 = 6;
const SOCKET: u8 = 12;
const CONTROL: u8 = 13;
const ANOTHER_PORT: u8 = 14;
const KEY: u8 = 0x80;
const KEY_TRUNK: u8 = KEY + 1;
const KEY_ISOLATED: u8 = KEY + 3;
const KEY_MAX_MACS: u8 = KEY + 4;
const KEY_STATIC: u8 = KEY + 5;
const KEY_SOCKET: u8 = KEY + 11;
const KEY_INJECTED: u8 = KEY + 15;

fn ask(kind: u8, name: u8, rest: &[u8]) -> Message {
    Message { flags: 0, kind, name, rest: rest.to_vec() }
}

/// Returns the message with other flags.
fn with(flags: u8, message: Message) -> Message {
    Message { flags, ..message }
}

pub(super) fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut seed = |name, world: u8, messages: &[Message], [chains, longest, frames]: [usize; 3], broken| {
        let mut bytes = vec![world];
        messages.iter().for_each(|message| message.put(&mut bytes));
        seeds.push(Seed {
            target: "privileged_helper",
            name,
            bytes,
            reaches: Reached { chains, longest, frames, broken },
        });
    };
    let connect = |name| ask(CONNECT, name, b"");
    let tidy = || ask(TIDY, 0, b"");
    let keep = |name, rest: &[u8]| ask(KEEP, name, rest);
    let all: Vec<_> = (0..8).map(connect).chain([ask(CONNECT, VM1, b"\0/../vm1"), connect(VM1)]).collect();
    seed("connect", PEER | LISTENS, &all, [10, 2, 0], false);
    seed("connect_to_nobody", LISTENS, &all, [10, 0, 0], false);
    let rules = [
        keep(VM0, &[VLAN, KEY]),
        keep(VM0, &[TRUNK, ISOLATED, KEY, KEY_TRUNK, KEY_ISOLATED]),
        keep(VM0, &[KEY_MAX_MACS, KEY_TRUNK, KEY]),
        keep(VM1, &[STATIC, KEY_STATIC]),
        // The static address is taken already.
        keep(VM0, &[STATIC, KEY_STATIC]),
        keep(VM1, &[]),
    ];
    seed("keep", PEER | LISTENS, &rules, [6, 0, 5], false);
    seed("keep_behind_a_link", LINK, &rules, [6, 0, 5], false);
    seed("keep_of_one_port_left", CHANGED, &rules, [6, 0, 2], false);
    seed("keep_in_nonsense", NONSENSE, &rules, [6, 0, 0], false);
    seed("keep_in_no_file", GONE, &rules, [6, 0, 0], false);
    let refused = [
        keep(RF0, &[VLAN, KEY]),
        keep(3, &[VLAN, KEY]),
        keep(VM0, &[NO_VLAN, KEY]),
        keep(VM0, &[SOCKET, KEY_SOCKET]),
        keep(VM0, &[KEY_SOCKET]),
        keep(VM0, &[VLAN, KEY_INJECTED]),
        keep(VM0, &[CONTROL, KEY]),
        keep(VM0, &[ANOTHER_PORT, KEY]),
        ask(
            KEEP_TEXT,
            VLAN,
            b"[[port]]\nkind='vhost-user'\nsocket='/x'\nname='vm0'\nvlan=9\n[switch]\nworkers=2",
        ),
        ask(KEEP_TEXT, VLAN, b""),
        ask(KEEP_TEXT, VLAN, b"port = [[[[[[[[[[[[["),
    ];
    seed("keep_refused", PEER | LISTENS, &refused, [11, 0, 1], false);
    seed("tidy", LISTENS, &[tidy(), tidy(), connect(VM1)], [3, 1, 0], false);
    seed("tidy_stale", PEER, &[tidy(), connect(VM1), tidy()], [3, 3, 0], false);
    seed("tidy_no_socket", NO_SOCKET, &[tidy(), tidy()], [2, 1, 0], false);
    let pieces = [
        with(8, ask(RAW, 0, b"{\"Connect\":{\"po")),
        ask(RAW, 0, b"rt\":\"vm1\"}}"),
        with(3, tidy()),
        with(8, ask(RAW, 0, b"\"Tidy\"  ")),
        with(1, ask(RAW, 0, b"")),
    ];
    seed("pieces_and_descriptors", PEER | LISTENS, &pieces, [3, 2, 0], false);
    seed("together", PEER | LISTENS, &[connect(VM1), with(4, tidy()), tidy()], [1, 1, 0], true);
    seed(
        "another_field",
        PEER,
        &[ask(RAW, 0, b"{\"Connect\":{\"port\":\"vm1\",\"path\":\"/\"}}")],
        [0, 0, 0],
        true,
    );
    seed("cut", PEER, &[tidy(), with(8, ask(RAW, 0, b"\"Tidy"))], [1, 2, 0], true);
    seed("no_end", PEER, &[with(8, ask(FLOOD, 60, b"\"")), with(8, ask(FLOOD, 60, b""))], [0, 0, 0], true);
    let long = [
        ask(KEEP_LONG, 255, b"# a long comment\n"),
        ask(KEEP_LONG, 16, b"[["),
        ask(KEEP_LONG, 9, b"a.b=1\n"),
    ];
    seed("long", PEER, &long, [3, 0, 0], false);
    seed("deep", PEER, &[ask(RAW, 0, &[b'['; 200])], [0, 0, 0], true);
    seeds
}
