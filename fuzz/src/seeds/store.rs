//! Scenarios for the store of Xen.

use super::Seed;
use crate::ring::Reached;
use crate::script::Field;
use crate::store::{Message, READ};

const DIRECTORY: u8 = 1;
const GET_PERMISSIONS: u8 = 3;
const WATCH: u8 = 4;
const UNWATCH: u8 = 5;
const START: u8 = 6;
const END: u8 = 7;
const WRITE: u8 = 11;
const MKDIR: u8 = 12;
const REMOVE: u8 = 13;
const SET_PERMISSIONS: u8 = 14;
const EVENT: u8 = 15;
const ERROR: u8 = 16;
const RESET_WATCHES: u8 = 21;
const PART: u8 = 22;

/// Numbers of paths in `PATHS`.
const NONE: u8 = 0;
const DATA: u8 = 2;
const A: u8 = 3;
const DEEP: u8 = 4;
const OF_SEVEN: u8 = 7;
const SECRET: u8 = 9;
const SHOWN: u8 = 10;
const RELEASE: u8 = 12;
const COMMIT: u8 = 15;

/// Returns a message whose path ends with a zero byte.
fn ask(kind: u8, number: u8, path: u8, rest: &[u8]) -> Message {
    Message { flags: 0, kind, number, path: path | 16, rest: rest.to_vec() }
}

/// Returns the message as sent by another connection.
fn other(from: u8, message: Message) -> Message {
    Message { flags: message.flags | from, ..message }
}

/// Returns an answer of a store.
fn tell(kind: u8, request: u8, rest: &[u8]) -> Message {
    // An answer must not arrive before its request was made.
    let flags = if request > 1 { 1 << 3 } else { 0 };
    Message { flags, path: NONE, ..ask(kind, request, NONE, rest) }
}

/// Returns a step that makes a call of the client.
fn call(kind: u8, path: u8) -> Message {
    Message { flags: 0x80, kind, number: 0, path, rest: Vec::new() }
}

pub(super) fn seeds() -> Vec<Seed> {
    let mut seeds = Vec::new();
    let mut seed = |name, side: u8, messages: &[Message], [chains, frames, longest]: [usize; 3], broken| {
        let mut bytes = vec![side];
        messages.iter().for_each(|message| message.put(&mut bytes));
        seeds.push(Seed {
            target: "xenstore",
            name,
            bytes,
            reaches: Reached { chains, longest, frames, broken },
        });
    };
    let nodes = [
        ask(WRITE, 0, DEEP, b"value"),
        ask(READ, 0, DEEP, b""),
        ask(MKDIR, 0, A, b""),
        ask(DIRECTORY, 0, A, b""),
        ask(PART, 0, A, b"0\0"),
        ask(SET_PERMISSIONS, 0, A, b"n5\0r7\0"),
        ask(GET_PERMISSIONS, 0, A, b""),
        other(2, ask(READ, 0, 6, b"")),
        other(2, ask(READ, 0, 5, b"")),
        ask(REMOVE, 0, A, b""),
        ask(READ, 0, DEEP, b""),
    ];
    seed("nodes", 0, &nodes, [11, 9, 2], false);
    let watches = [
        ask(WATCH, 0, DATA, b"t\0"),
        other(1, ask(WATCH, 0, A, b"u\0")),
        ask(WATCH, 0, RELEASE, b"v\0"),
        ask(WATCH, 0, DATA, b"t\0"),
        other(1, ask(WRITE, 0, DEEP, b"x")),
        ask(REMOVE, 0, A, b""),
        ask(UNWATCH, 0, DATA, b"t\0"),
        ask(RESET_WATCHES, 0, NONE, b""),
    ];
    seed("watches", 0, &watches, [8, 7, 2], false);
    let transactions = [
        ask(START, 0, NONE, b""),
        ask(READ, 1, A, b""),
        ask(WRITE, 1, A, b"1"),
        ask(END, 1, COMMIT, b""),
        ask(START, 0, NONE, b""),
        ask(READ, 2, A, b""),
        other(1, ask(WRITE, 0, A, b"2")),
        ask(WRITE, 2, A, b"3"),
        ask(END, 2, COMMIT, b""),
        ask(START, 0, NONE, b""),
        ask(START, 0, NONE, b""),
        ask(START, 0, NONE, b""),
        ask(START, 3, NONE, b""),
        ask(READ, 9, A, b""),
    ];
    seed("transactions", 0, &transactions, [14, 9, 3], false);
    let denied = [
        ask(READ, 0, SECRET, b""),
        ask(WRITE, 0, SECRET, b"1"),
        ask(READ, 0, SHOWN, b""),
        ask(WRITE, 0, SHOWN, b"1"),
        ask(REMOVE, 0, SHOWN, b""),
        ask(SET_PERMISSIONS, 0, SECRET, b"b5\0"),
        ask(WRITE, 0, OF_SEVEN, b"1"),
        ask(SET_PERMISSIONS, 0, DATA, b"b0\0"),
        ask(WATCH, 0, SECRET, b"t\0"),
    ];
    seed("denied", 0, &denied, [9, 2, 2], false);
    // Requests exceed every limit: nodes, bytes of a value, entries, watches.
    let names: Vec<_> = (b'a'..b'p').map(|name| ask(WRITE, 0, A, b"").with_name(name)).collect();
    let mut limits = names;
    limits.push(ask(WRITE, 0, DATA, &[b'x'; 65]));
    limits.push(ask(SET_PERMISSIONS, 0, DATA, b"n5\0r7\0r8\0r9\0"));
    limits.extend((b'0'..b'6').map(|token| ask(WATCH, 0, DATA, &[token, 0])));
    seed("limits", 0, &limits, [23, 15, 13], false);
    let wrong = [
        ask(READ, 0, NONE, b""),
        Message { path: A, ..ask(READ, 0, A, b"") },
        ask(EVENT, 0, A, b""),
        ask(ERROR, 0, A, b""),
        ask(99, 0, A, b""),
        ask(SET_PERMISSIONS, 0, A, b"x5"),
        ask(PART, 0, DATA, b"9\0"),
        ask(READ, 0, NONE, b"\xff/..\0"),
    ];
    seed("malformed", 0, &wrong, [8, 0, 2], false);
    let cut = [
        Message { flags: 1 << 5, ..ask(READ, 0, DATA, b"") },
        ask(READ, 0, DATA, b""),
        Message { flags: 1 << 2 | 1, ..ask(READ, 0, DATA, b"") },
        Message { flags: 1 << 4 | 2, ..ask(READ, 0, DATA, b"") },
    ];
    seed("cut", 0, &cut, [1, 1, 2], true);
    let unread: Vec<_> = (0..8).map(|_| Message { flags: 1 << 3, ..ask(READ, 0, DATA, b"") }).collect();
    seed("unread", 0, &unread, [8, 8, 2], false);

    let calls = [
        tell(EVENT, 0, b"/a\x007\0"),
        tell(READ, 1, b"12"),
        tell(READ, 2, b"12"),
        tell(READ, 3, b"12"),
        tell(DIRECTORY, 4, b"a\0b\0"),
        tell(GET_PERMISSIONS, 5, b"n0\0r7\0"),
        tell(WATCH, 6, b"OK\0"),
        tell(EVENT, 0, b"/b\x007\0"),
        tell(EVENT, 0, b"/b c\x007\0"),
        tell(UNWATCH, 7, b"OK\0"),
        tell(WRITE, 8, b"OK\0"),
    ];
    let mut answered = calls.to_vec();
    answered.extend([0, 1, 2, 3, 4, 5, 6, 8, 9].map(|kind| call(kind, A)));
    seed("client", 1, &answered, [8, 2, 2], true);
    let transaction = [
        tell(START, 1, b"1\0"),
        tell(READ, 2, b""),
        tell(ERROR, 3, b"EAGAIN\0"),
        tell(END, 4, b"OK\0"),
        tell(START, 5, b"2\0"),
        tell(ERROR, 6, b"ENOENT\0"),
        tell(WRITE, 7, b"OK\0"),
        tell(END, 8, b"OK\0"),
        call(7, A),
    ];
    seed("client_transaction", 1, &transaction, [1, 0, 0], false);
    let parts = [
        tell(ERROR, 1, b"E2BIG\0"),
        tell(PART, 2, b"5\0a\0b\0"),
        tell(PART, 3, b"6\0c\0"),
        tell(PART, 4, b"6\0a\0"),
        tell(PART, 5, b"6\0b\0\0"),
        call(3, A),
    ];
    seed("client_parts", 1, &parts, [1, 0, 2], false);
    for (name, answer) in [
        ("client_names", tell(DIRECTORY, 1, b"a\0..\0")),
        ("client_another_kind", tell(READ, 1, b"a\0")),
        ("client_refused", tell(ERROR, 1, b"whatever")),
    ] {
        let broken = name == "client_another_kind";
        seed(name, 1, &[answer, call(3, A)], [0, 0, 0], broken);
    }
    let long = Message { flags: 1 << 2, ..tell(READ, 1, b"") };
    seed("client_too_long", 1, &[long, call(0, A), call(0, A)], [0, 0, 0], true);
    seed("client_no_answer", 1, &[call(9, A), call(0, A)], [0, 0, 0], true);
    seeds
}

impl Message {
    /// Returns the message for a node of this name, below the path `DATA`.
    fn with_name(self, name: u8) -> Self {
        Self { path: DATA, rest: [b"/", &[name, 0][..], &self.rest].concat(), ..self }
    }
}
