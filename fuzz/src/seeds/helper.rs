//! Scenarios for the privileged helper.

use super::Seed;
use crate::helper::{
    CAN_OPEN, CHANGED, CLOSE, CONNECT, DROP_IN, FLOOD, FORGET, GONE, KEEP, KEEP_LONG, KEEP_PORT, KEEP_TEXT,
    LINK, LISTENS, Message, NAMES, NO_SOCKET, NONSENSE, OPEN, PEER, PORTS, RAW, READ, TIDY,
};
use crate::ring::Reached;
use crate::script::Field;

/// Numbers of ports in `NAMES`.
const VM0: u8 = 0;
const VM1: u8 = 1;
const RF0: u8 = 2;
const VM3: u8 = 8;
const VM4: u8 = 9;
const NEW: u8 = 10;
const IN: u8 = 11;
const PEER_PORT: u8 = 12;
const BEHIND: u8 = 13;
const LINK_PORT: u8 = 14;
const VM9: u8 = 17;
/// Numbers of ports in `PORTS`, and of further keys in `OPTIONS`.
const AT_NEW: u8 = 0;
const AT_IN: u8 = 1;
const AT_PEER: u8 = 2;
const AT_BEHIND: u8 = 3;
const AT_LISTEN: u8 = 10;
const AT_STRANGER: u8 = 12;
const AT_LINK: u8 = 14;
const AT_VM3: u8 = 16;
const AT_VM4: u8 = 17;
const AT_VM1: u8 = 18;
const TAP_LO: u8 = 22;
const XEN: u8 = 24;
const XEN_PROCESS: u8 = 25;
const NAMED_VM0: u8 = 0x80;
const NAMED_VM9: u8 = 0x81;
const CONNECTS: u8 = 0x82;
const LARGE: u8 = 0x83;
const WORKER: u8 = 0x84;
/// Numbers of rules in `RULES`, and of keys in `KEYS`.
const VLAN: u8 = 0;
const NO_VLAN: u8 = 1;
const TRUNK: u8 = 2;
const ISOLATED: u8 = 4;
const STATIC: u8 = 6;
const SOCKET: u8 = 12;
const CONTROL: u8 = 13;
const ANOTHER_PORT: u8 = 14;
const QUEUE_SIZE: u8 = 16;
const CSUM: u8 = 17;
const KEY: u8 = 0x80;
const KEY_TRUNK: u8 = KEY + 1;
const KEY_ISOLATED: u8 = KEY + 3;
const KEY_MAX_MACS: u8 = KEY + 4;
const KEY_STATIC: u8 = KEY + 5;
const KEY_SOCKET: u8 = KEY + 11;
const KEY_INJECTED: u8 = KEY + 15;
const KEY_QUEUE_SIZE: u8 = KEY + 16;
const KEY_CSUM: u8 = KEY + 17;

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
    let settings = [
        keep(VM0, &[QUEUE_SIZE, CSUM, KEY_QUEUE_SIZE, KEY_CSUM]),
        with(1 << 5, keep(VM0, &[CSUM, KEY_QUEUE_SIZE, KEY_CSUM])),
        // Nothing else of the port is what the file is to have.
        keep(VM0, &[QUEUE_SIZE]),
    ];
    seed("keep_settings", PEER | LISTENS, &settings, [3, 0, 3], false);
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

    let open = |port, rest: &[u8]| ask(OPEN, port, rest);
    let keep_port = |port, rest: &[u8]| ask(KEEP_PORT, port, rest);
    let close = |name| ask(CLOSE, name, b"");
    let forget = |name| ask(FORGET, name, b"");
    let read = || ask(READ, 0, b"");
    let can_open = |port| ask(CAN_OPEN, port, b"");
    /// Flag: what the helper has sent is closed before.
    const CLOSED: u8 = 16;
    // Open and kept are those in the directories that the configuration names: new, in, peer, behind; and stranger, whose file is
    // stale.
    let each: Vec<_> = (0..PORTS.len() as u8).flat_map(|at| [open(at, &[]), keep_port(at, &[])]).collect();
    seed("open_each", PEER | LISTENS, &each, [52, 9, 7], false);
    seed("open_each_without_file", GONE, &each, [52, 10, 0], false);
    seed("open_each_in_changed_file", CHANGED | DROP_IN, &each, [52, 10, 7], false);
    let listen = [
        open(AT_NEW, &[VLAN]),
        keep_port(AT_NEW, &[ISOLATED]),
        // What was opened has another name, MTU or kind.
        keep_port(AT_NEW, &[NAMED_VM9]),
        keep_port(AT_NEW, &[LARGE]),
        keep_port(AT_IN, &[]),
        keep_port(AT_NEW, &[]),
        read(),
        keep(NEW, &[VLAN, KEY]),
        // The switch still listens.
        close(NEW),
        forget(NEW),
        forget(NEW),
        read(),
        with(CLOSED, open(AT_IN, &[WORKER])),
        with(CLOSED, close(IN)),
        with(CLOSED, open(AT_BEHIND, &[])),
        keep_port(AT_BEHIND, &[]),
        with(CLOSED, tidy()),
        connect(BEHIND),
    ];
    seed("open_to_listen", PEER | LISTENS, &listen, [18, 5, 4], false);
    let connections = [
        open(AT_PEER, &[]),
        connect(PEER_PORT),
        keep_port(AT_PEER, &[]),
        // A front end that listens at a socket of the switch itself.
        open(AT_IN, &[]),
        open(AT_IN, &[CONNECTS, NAMED_VM9]),
        connect(VM9),
        close(VM9),
        connect(VM9),
        close(PEER_PORT),
        connect(PEER_PORT),
        open(AT_PEER, &[]),
        connect(PEER_PORT),
        forget(PEER_PORT),
    ];
    seed("open_to_connect", PEER, &connections, [13, 5, 2], false);
    let through_links = [
        open(AT_LINK, &[]),
        connect(LINK_PORT),
        open(AT_LINK + 1, &[NAMED_VM9]),
        open(7, &[]),
        open(7, &[CONNECTS]),
        open(8, &[]),
        open(8, &[CONNECTS]),
        open(6, &[CONNECTS]),
    ];
    seed("open_through_links", PEER | LISTENS, &through_links, [8, 0, 0], false);
    let again = [
        open(AT_LISTEN, &[]),
        with(CLOSED, close(VM0)),
        open(AT_LISTEN, &[]),
        open(AT_LISTEN, &[]),
        close(VM1),
        connect(VM1),
        open(AT_VM1, &[]),
        connect(VM1),
        keep_port(AT_VM1, &[]),
        // It was opened, so it may come back.
        forget(VM1),
        open(AT_VM1, &[]),
        keep_port(AT_VM1, &[LARGE]),
        keep_port(AT_VM1, &[]),
        // Another port under the name of one that was forgotten.
        close(VM0),
        forget(VM0),
        open(AT_NEW, &[NAMED_VM0]),
        keep_port(AT_NEW, &[NAMED_VM0]),
        read(),
    ];
    seed("open_again", PEER, &again, [18, 4, 4], false);
    let drop_in = [
        keep(VM4, &[VLAN, KEY]),
        open(AT_VM4, &[]),
        close(VM4),
        open(AT_VM4, &[]),
        keep_port(AT_VM4, &[]),
        read(),
        forget(VM4),
        read(),
        keep_port(AT_VM4, &[TRUNK]),
        forget(VM1),
        forget(VM0),
    ];
    seed("drop_in", DROP_IN | PEER, &drop_in, [11, 2, 5], false);
    seed("drop_in_beside_a_link", DROP_IN | LINK, &drop_in, [11, 2, 5], false);
    let changed = [
        open(AT_VM3, &[LARGE]),
        open(AT_VM3, &[VLAN]),
        keep_port(AT_VM3, &[]),
        with(CLOSED, close(VM3)),
        forget(VM3),
        open(AT_VM3, &[]),
    ];
    // What was open once may be opened again.
    seed("open_what_the_file_has_now", CHANGED, &changed, [6, 3, 1], false);
    seed("open_what_no_file_has", PEER, &changed, [6, 0, 0], false);
    let forgotten: Vec<_> = (0..NAMES.len() as u8).map(forget).chain([read()]).collect();
    seed("forget_all", PEER | LISTENS, &forgotten, [19, 0, 2], false);
    seed("forget_in_nonsense", NONSENSE | DROP_IN, &forgotten, [19, 0, 0], false);
    let stranger = [open(AT_STRANGER, &[]), with(CLOSED, close(15)), open(AT_STRANGER, &[NAMED_VM9])];
    seed("open_in_place_of_a_stale_socket", PEER, &stranger, [3, 2, 0], false);
    let others = [
        can_open(TAP_LO),
        can_open(AT_IN),
        can_open(AT_STRANGER),
        open(TAP_LO, &[]),
        keep_port(TAP_LO, &[]),
        open(XEN, &[]),
        keep_port(XEN, &[]),
        open(XEN_PROCESS, &[]),
        keep_port(XEN_PROCESS, &[]),
        read(),
    ];
    seed("open_other_kinds", PEER, &others, [10, 0, 0], false);
    let arrays = [
        ask(RAW, 0, b"{\"Open\":[\"[[port]]\\nkind='vhost-user'\\nsocket='HERE/machines/in.sock'\",1]}"),
        ask(RAW, 0, b"{\"KeepPort\":\n[\"[[port]]\\nkind='vhost-user'\\nsocket='HERE/machines/in.sock'\"]}"),
        ask(RAW, 0, b"\"Read\""),
        ask(RAW, 0, b"{\"Read\":{\"workers\":-1}}"),
    ];
    seed("fields_in_arrays", PEER, &arrays, [3, 2, 1], true);
    seeds
}
