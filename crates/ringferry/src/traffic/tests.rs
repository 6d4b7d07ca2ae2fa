//! Every mode end to end over loopback.

use super::*;
use std::net::TcpListener;
use std::thread;

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn client(to: &str, port: u16, mode: Mode) -> ClientArgs {
    ClientArgs {
        to: to.into(),
        port,
        mode,
        seconds: 0.2,
        size: None,
        sessions: 1,
        rate: None,
        wait: 5.0,
        interval: None,
        progress_json: false,
        json: false,
    }
}

/// Runs one test against a server of its own.
fn loopback(address: &str, change: impl FnOnce(&mut ClientArgs), mode: Mode) -> Result<Report, Error> {
    let port = free_port();
    let bind = Some(address.parse().unwrap());
    let server = thread::spawn(move || server::run(&ServerArgs { bind, port, once: true }));
    let mut args = client(address, port, mode);
    change(&mut args);
    let report = client::measure(&args);
    let served = server.join().unwrap();
    assert_eq!(served.is_ok(), report.is_ok(), "{served:?} {report:?}");
    report
}

#[test]
fn tcp_in_each_direction_delivers_every_byte() {
    for (mode, streams) in [(Mode::Tcp, 1), (Mode::TcpReverse, 1), (Mode::TcpBoth, 2)] {
        let report = loopback("127.0.0.1", |_| {}, mode).unwrap();
        report.verdict().unwrap();
        assert_eq!(report.streams.len(), streams, "{mode}");
        assert!(
            report.streams.iter().all(|stream| stream.bytes > 0 && stream.bits_per_second > 0.0),
            "{report:?}"
        );
        assert!(report.bytes == report.sent_bytes && report.bytes.is_multiple_of(128 << 10));
    }
}

#[test]
fn udp_accounts_for_every_datagram() {
    let report = loopback("127.0.0.1", |args| args.rate = Some(50_000_000), Mode::Udp).unwrap();
    report.verdict().unwrap();
    let (sent, arrived) = (report.sent_packets.unwrap(), report.packets.unwrap());
    assert!(arrived > 0 && arrived + report.lost == sent, "{report:?}");
    assert_eq!(report.bytes, arrived * 1472);
    assert!(report.sent_bytes * 8 <= 50_000_000, "0.2 s at 50 Mbit/s is 10 Mbit: {report:?}");
    assert_eq!((report.corrupt, report.duplicated), (0, 0));
}

#[test]
fn request_response_measures_latency_for_any_size() {
    for size in [1, 100, 70_000] {
        let report = loopback("127.0.0.1", |args| args.size = Some(size), Mode::Rr).unwrap();
        report.verdict().unwrap();
        let latency = report.latency_us.unwrap();
        assert!(
            report.transactions.unwrap() > 0 && report.bytes == report.transactions.unwrap() * size as u64
        );
        assert!(
            0.0 < latency.p50
                && latency.p50 <= latency.p90
                && latency.p90 <= latency.p99
                && latency.p999 <= latency.max,
            "{latency:?}"
        );
    }
}

#[test]
fn every_transaction_can_have_a_connection_of_its_own() {
    for (size, sessions) in [(1, 1), (70_000, 1), (100, 7)] {
        let change = |args: &mut ClientArgs| (args.size, args.sessions) = (Some(size), sessions);
        let report = loopback("127.0.0.1", change, Mode::Crr).unwrap();
        report.verdict().unwrap();
        let count = report.transactions.unwrap();
        // Each session has done some: their calls go to ports of their own.
        assert!(count >= u64::from(sessions) && report.bytes == count * size as u64, "{report:?}");
        assert!(report.latency_us.unwrap().p50 > 0.0 && report.sessions == sessions);
        // What the server answered is what the client heard.
        assert_eq!((report.sent_bytes, report.corrupt), (2 * report.bytes, 0));
    }
}

#[test]
fn sessions_run_at_once_in_every_mode_and_their_figures_add_up() {
    for mode in [Mode::Tcp, Mode::TcpReverse, Mode::TcpBoth, Mode::Udp, Mode::Rr, Mode::Crr] {
        let change = |args: &mut ClientArgs| {
            args.sessions = 5;
            args.size = Some(if mode == Mode::Udp { 100 } else { 3 });
            args.rate = (mode == Mode::Udp).then_some(8_000_000);
        };
        let report = loopback("127.0.0.1", change, mode).unwrap();
        report.verdict().unwrap();
        assert_eq!(report.sessions, 5);
        // A direction is one entry, however many sessions.
        assert_eq!(report.streams.len(), if mode == Mode::TcpBoth { 2 } else { 1 }, "{mode}");
        assert_eq!(report.corrupt, 0, "{mode}");
        if mode == Mode::Udp {
            assert_eq!(report.packets.unwrap() + report.lost, report.sent_packets.unwrap());
        }
    }
}

#[test]
fn ipv6_works_for_tcp_and_udp() {
    if std::net::UdpSocket::bind("[::1]:0").is_err() {
        assert!(std::env::var_os("CI").is_none(), "no IPv6 loopback");
        eprintln!("skipped: no IPv6 loopback");
        return;
    }
    for mode in [Mode::Tcp, Mode::Udp, Mode::Crr] {
        loopback("::1", |args| args.rate = Some(20_000_000), mode).unwrap().verdict().unwrap();
    }
}

#[test]
fn a_refusal_reaches_the_client_and_the_server_serves_on() {
    let error = loopback("127.0.0.1", |args| args.size = Some(1 << 30), Mode::Tcp).unwrap_err();
    assert!(matches!(&error, Error::Peer(reason) if reason.contains("size")), "{error}");
}

#[test]
fn one_server_serves_many_tests_and_survives_strangers() {
    let port = free_port();
    // Ends with the test process: a server runs until killed.
    thread::spawn(move || server::run(&ServerArgs { bind: None, port, once: false }));
    client::measure(&client("127.0.0.1", port, Mode::Rr)).unwrap().verdict().unwrap();
    let mut stranger = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    io::Write::write_all(&mut stranger, b"GET / HTTP/1.1\r\n\r\n").unwrap();
    client::measure(&client("127.0.0.1", port, Mode::Rr)).unwrap().verdict().unwrap();
}

#[test]
fn nobody_there_is_a_clear_error() {
    let mut args = client("127.0.0.1", free_port(), Mode::Tcp);
    args.wait = 0.0;
    let message = client::measure(&args).unwrap_err().to_string();
    assert!(
        message.contains("cannot reach 127.0.0.1") && message.contains("ringferry traffic server"),
        "{message}"
    );
}

#[test]
fn rates_and_seconds_are_parsed_with_their_units() {
    assert_eq!(
        (rate("800000"), rate("2.5G"), rate("500M"), rate("1k")),
        (Ok(800_000), Ok(2_500_000_000), Ok(500_000_000), Ok(1000))
    );
    for bad in ["", "G", "-1", "0", "1T", "nan", "inf"] {
        assert!(rate(bad).is_err(), "{bad}");
    }
    assert_eq!(seconds("0.2"), Ok(0.2));
    assert!(seconds("-1").is_err() && seconds("nan").is_err() && seconds("1e9").is_err());
}
