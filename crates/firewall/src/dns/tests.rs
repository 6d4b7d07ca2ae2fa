use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

fn wire(name: &str) -> Vec<u8> {
    let labels = name.split('.').filter(|label| !label.is_empty());
    let mut bytes: Vec<u8> =
        labels.flat_map(|label| [&[label.len() as u8], label.as_bytes()].concat()).collect();
    bytes.push(0);
    bytes
}

fn message(flags: u16, name: &[u8], kind: u16, answers: &[Vec<u8>]) -> Vec<u8> {
    let mut message = [7, 9].to_vec();
    message.extend(flags.to_be_bytes());
    message.extend([0, 1, 0, answers.len() as u8, 0, 0, 0, 0]);
    message.extend(name);
    message.extend(kind.to_be_bytes());
    message.extend(CLASS_IN.to_be_bytes());
    message.extend(answers.concat());
    message
}

fn record(of: &[u8], kind: u16, ttl: u32, data: &[u8]) -> Vec<u8> {
    let mut record = of.to_vec();
    record.extend(kind.to_be_bytes());
    record.extend(CLASS_IN.to_be_bytes());
    record.extend(ttl.to_be_bytes());
    record.extend((data.len() as u16).to_be_bytes());
    record.extend(data);
    record
}

fn found(answers: &[Vec<u8>]) -> Option<Vec<(String, u32)>> {
    match Message::read(&message(RESPONSE, &wire("www.Example.com"), TYPE_A, answers)) {
        Some(Message::Response(_, found)) => {
            Some(found.into_iter().map(|(address, ttl)| (address.to_string(), ttl)).collect())
        }
        _ => None,
    }
}

/// Points to the name of the question.
const ASKED: [u8; 2] = [0xc0, 12];

#[test]
fn queries_are_read_in_lower_case() {
    let read = Message::read(&message(0x0100, &wire("WWW.example.COM"), TYPE_AAAA, &[]));
    let Some(Message::Query(Question { id: 0x0709, name, kind: TYPE_AAAA })) = read else {
        panic!("{read:?}")
    };
    assert_eq!(name.labels().collect::<Vec<_>>(), [&b"www"[..], b"example", b"com"]);
}

#[test]
fn a_query_has_nothing_behind_its_question_but_options() {
    let query = |more: &[u8], records: u8| {
        let mut query = message(0x0100, &wire("a.org"), TYPE_A, &[]);
        query[11] = records;
        query.extend(more);
        Message::read(&query).is_some()
    };
    let options = |len: u8| [&[0, 0, 41, 4, 208, 0, 0, 0, 0, 0, len][..], &vec![7; len.into()]].concat();
    assert!(query(&[], 0) && query(&options(0), 1) && query(&options(128), 1));
    assert!(!query(&[7], 0) && !query(&options(129), 1) && !query(&options(9)[..15], 1));
    assert!(
        !query(&[&options(0)[..], &[1]].concat(), 1) && !query(&wire("b.org"), 1) && !query(&options(0), 2)
    );
    for kind in [249, 252, 255] {
        assert_eq!(Message::read(&message(0x0100, &wire("a.org"), kind, &[])), None, "{kind}");
    }
}

#[test]
fn answers_that_fail_or_are_cut_short_have_no_addresses() {
    for (flags, known) in [(RESPONSE, 1), (RESPONSE | 3, 0), (RESPONSE | TRUNCATED, 0)] {
        let answer = record(&ASKED, TYPE_A, 60, &[1, 2, 3, 4]);
        let read = Message::read(&message(flags, &wire("a.org"), TYPE_A, &[answer]));
        let Some(Message::Response(_, found)) = read else { panic!("{flags:x}") };
        assert_eq!(found.len(), known, "{flags:x}");
    }
}

#[test]
fn answers_have_the_addresses_to_which_the_chain_leads() {
    let v6 = "2001:db8::1".parse::<Ipv6Addr>().unwrap().octets();
    let direct = found(&[record(&ASKED, TYPE_A, 60, &[1, 2, 3, 4]), record(&ASKED, TYPE_AAAA, 30, &v6)]);
    assert_eq!(direct.unwrap(), [("1.2.3.4".to_owned(), 60), ("2001:db8::1".to_owned(), 30)]);
    // The links in any order; the shortest time counts, and who is not asked for does not.
    let chain = [
        record(&wire("c.net"), TYPE_A, 300, &[5, 5, 5, 5]),
        record(&wire("b.net"), TYPE_CNAME, 20, &wire("c.net")),
        record(&wire("other.net"), TYPE_A, 300, &[6, 6, 6, 6]),
        record(&ASKED, TYPE_CNAME, 100, &wire("B.net")),
    ];
    assert_eq!(found(&chain).unwrap(), [("5.5.5.5".to_owned(), 20)]);
    let looped =
        [record(&ASKED, TYPE_CNAME, 1, &wire("b.net")), record(&wire("b.net"), TYPE_CNAME, 1, &ASKED)];
    assert_eq!(found(&looped).unwrap(), []);
    assert_eq!(found(&[record(&ASKED, TYPE_A, 0x8000_0001, &[1, 2, 3, 4])]).unwrap()[0].1, 0);
}

#[test]
fn messages_that_are_none_are_refused() {
    let name = wire("a.example.com");
    let good = message(RESPONSE, &name, TYPE_A, &[record(&ASKED, TYPE_A, 60, &[1, 2, 3, 4])]);
    assert!(Message::read(&good).is_some());
    for cut in 0..good.len() {
        assert_eq!(Message::read(&good[..cut]), None, "{cut}");
    }
    let with = |at: usize, value: u8| {
        let mut changed = good.clone();
        changed[at] = value;
        Message::read(&changed)
    };
    assert_eq!(with(5, 2), None, "two questions");
    assert_eq!(with(2, 0xa8), None, "an update");
    assert_eq!(with(12, 0x40), None, "a label of a kind that there is not");
    assert_eq!(with(30, 9), None, "another class");
    assert_eq!(found(&[record(&[0xc0, 40], TYPE_A, 1, &[1; 4])]), None, "a pointer forwards, or to itself");
    assert_eq!(found(&[record(&ASKED, TYPE_A, 1, &[1; 5])]), None, "an address of five bytes");
    assert_eq!(found(&[record(&ASKED, TYPE_CNAME, 1, &[1, b'a', 0, 0])]), None, "a name that ends too early");
    let long =
        [&[63][..], &[b'a'; 63], &[63], &[b'b'; 63], &[63], &[b'c'; 63], &[62], &[b'd'; 62], &[0]].concat();
    assert_eq!(Message::read(&message(0, &long, TYPE_A, &[])), None, "256 bytes");
}

#[test]
fn patterns_are_for_one_name_or_all_below_it() {
    let name = |text: &str| Name::read(&wire(&text.to_ascii_uppercase()), 0).unwrap().0;
    let one = Pattern::read("Example.com").unwrap();
    assert!(one.matches(&name("example.com")) && !one.matches(&name("www.example.com")));
    let below = Pattern::read("*.example.com.").unwrap();
    assert!(below.matches(&name("www.example.com")) && below.matches(&name("a.b.example.com")));
    assert!(!below.matches(&name("example.com")) && !below.matches(&name("badexample.com")));
    // A label may have a dot in it, which makes no other name of it.
    let tricky = Name::read(b"\x0bexample.com\x00", 0).unwrap().0;
    assert!(!one.matches(&tricky));
    for text in ["", "com", "*", "*.", "a..b", "*.*.com", "exämple.com", "a b.com", "-"] {
        assert!(Pattern::read(text).is_err(), "{text:?}");
    }
}

proptest! {
    #[test]
    fn any_bytes_do_no_harm(mut bytes in vec(any::<u8>(), 0..200), questions in 0..2u8) {
        if let Some(header) = bytes.get_mut(..8) {
            (header[2], header[4], header[5], header[6]) = (header[2] & 0x80, 0, questions, 0);
        }
        let _ = Message::read(&bytes);
    }
}
