//! `ringferry metrics`: serves what a running switch counts to Prometheus and its like.
//!
//! **A process of its own**, which asks the switch on its control socket: HTTP is parsed where no guest's memory is mapped, the switch's sandbox allows
//! nothing more for it, and it goes on whatever becomes of the switch; a newer program that takes over keeps the control socket, so no scrape fails.
//!
//! **No scraper holds up another one, or the switch.** The server (http) serves all connections in one thread, and a second one asks the switch, at most once in a quarter of a second however
//! many scrapers there are; all that ask meanwhile get the same text, which is in memory once for each format.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringferry_control::channels::Stats;
use ringferry_control::metrics::{Format, of_switch};
use ringferry_control::snapshot::Snapshot;
use ringferry_control::{self as control, Answer, ControlError, Patience, Request};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::signal::{Signal, Signals};

use crate::http::{self, Asker, Begun, Endpoint, Response, ServeError, Server, Service, Socket};
use ringferry_sys::ready::{Ready, ReadyError};

/// Shown below the options by `ringferry metrics --help`.
const EXAMPLES: &str = "\
The answer is in the text format of Prometheus, or in OpenMetrics for whoever prefers that (Accept). GET / and /metrics are the same. There is
neither encryption nor a password: leave an address at loopback, or behind a proxy that has them.

Examples:
  ringferry metrics                                              at /run/ringferry/metrics.sock
  ringferry metrics --listen 127.0.0.1:9482 --queues             for a Prometheus on this host, with each queue pair
  ringferry metrics --listen /run/ringferry/metrics.sock --listen [::1]:9482
  curl --unix-socket /run/ringferry/metrics.sock http://switch/metrics
  ringferry metrics --once                                       print them, for a textfile collector";

/// Serves what a running switch counts, for Prometheus.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct MetricsArgs {
    /// Where to listen: the path of a Unix socket, or an address and a port. May be given several times [default: metrics.sock beside the control
    /// socket].
    #[arg(long, value_name = "PATH|ADDRESS:PORT")]
    listen: Vec<Endpoint>,

    /// Allow addresses other than loopback, at which other hosts can read the counters.
    #[arg(long)]
    public: bool,

    /// Counters of each queue pair, too: some twenty series for each.
    #[arg(long)]
    queues: bool,

    /// Print the metrics once, and end.
    #[arg(long, conflicts_with_all = ["listen", "public", "ready_fd"])]
    once: bool,

    /// Control socket of the switch [default: as for `ringferry ctl`].
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// Write "READY" and a newline to this descriptor when all sockets listen, then close it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(3..))]
    ready_fd: Option<i32>,
}

/// Why nothing is served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no switch to ask.
    #[error(transparent)]
    Control(#[from] ControlError),
    /// A socket cannot be had.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// What answers is a guest.
    #[error(
        "this is the control socket of a ringferry guest, which has no ports: name that of the switch it is plugged into"
    )]
    NoSwitch,
    /// The text cannot be written, or not as a whole.
    #[error("cannot write the text: {0}")]
    Write(io::Error),
    /// The descriptor of --ready-fd is none.
    #[error(transparent)]
    Ready(#[from] ReadyError),
    /// The system has no descriptors or threads left.
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// See [`enum@Error`].
pub fn run(args: &MetricsArgs) -> Result<(), Error> {
    let control = args.control.clone().unwrap_or_else(control::default_path);
    if args.once {
        let (snapshot, queues) = ask(&control, args.queues)?;
        let text = of_switch(&snapshot, &queues, Format::Text);
        let mut out = io::stdout();
        return match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            // A reader that has gone needs no answer; half a file for a collector is worse than none.
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Error::Write(error)),
            _ => Ok(()),
        };
    }
    let ready = args.ready_fd.map(Ready::take).transpose()?;
    let signals = Signals::new(&[Signal::TERM, Signal::INT])?;
    let beside = [Endpoint::Unix(control.with_file_name("metrics.sock"))];
    let endpoints = if args.listen.is_empty() { &beside[..] } else { &args.listen };
    let queues = args.queues;
    // One line when it falls silent, and one when it answers again.
    let silent = AtomicBool::new(false);
    let asker = Asker::start(move |()| {
        let page = page(&control, queues);
        match (&page, silent.swap(page.is_err(), Ordering::Relaxed)) {
            (Err(why), false) => tracing::warn!("scrapers get 503: {why}"),
            (Ok(_), true) => tracing::info!("the switch answers again"),
            _ => {}
        }
        page
    })?;
    let mut server = Server::new(Metrics { asker, is_public: args.public })?;
    for endpoint in endpoints {
        server.listen(Socket::bind(endpoint, args.public)?, "metrics are served")?;
    }
    if let Some(ready) = ready {
        ready.say();
    }
    Ok(server.serve(&signals)?)
}

/// What a switch says now.
fn ask(control: &Path, queues: bool) -> Result<(Snapshot, Vec<Stats>), Error> {
    let Answer::Show(snapshot) =
        control::call_with(control, &Request::Show { addresses: Some(0) }, Patience::SHORT)?
    else {
        return Err(Error::NoSwitch);
    };
    let mut stats = Vec::new();
    for port in snapshot.ports.iter().filter(|_| queues) {
        match control::call_with(
            control,
            &Request::Stats { port: port.name.clone(), queues: true },
            Patience::SHORT,
        ) {
            Ok(Answer::Stats(of)) => stats.push(of),
            // It was removed meanwhile.
            Ok(_) | Err(ControlError::Refused(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok((*snapshot, stats))
}

/// What scrapers get: the texts, or why there are none.
type Page = Result<BTreeMap<Format, Arc<[u8]>>, String>;

/// Asks the switch for what scrapers get.
fn page(control: &Path, queues: bool) -> Page {
    let (snapshot, queues) = ask(control, queues).map_err(|error| error.to_string())?;
    let formats = [Format::Text, Format::OpenMetrics];
    Ok(formats.map(|format| (format, of_switch(&snapshot, &queues, format).into_bytes().into())).into())
}

/// What is served: one page, in two formats.
struct Metrics {
    asker: Asker<(), Page>,
    /// Whether other hosts may read it, under whatever name they know this one by.
    is_public: bool,
}

impl Service for Metrics {
    /// The format, and when it was asked for.
    type Pending = (Format, Instant);

    fn begin(&self, request: &http::Request, is_unix: bool) -> Begun<(Format, Instant)> {
        // A scraper is no browser, and a browser that was led here by a page of another site is to read nothing.
        let is_no_browser = request.field("host").next().is_none();
        let names_us = self.is_public || is_no_browser || request.names_this_host(is_unix);
        if !request.is_of_same_site() || !names_us {
            return Begun::Answered(Response::text(
                "403 Forbidden",
                "metrics are read by this host's address, as http://127.0.0.1:9482/metrics, and from no other site; --public allows other names",
            ));
        }
        if !matches!(request.path.as_str(), "/" | "/metrics") {
            return Begun::Answered(Response::refused("404 Not Found"));
        }
        let accept: Vec<_> = request.field("accept").collect();
        Begun::Pending((Format::accepted(&accept.join(",")), Instant::now()), Duration::ZERO)
    }

    fn poll(&self, (format, since): &(Format, Instant)) -> Option<Response> {
        Some(match self.asker.get(&(), *since)? {
            Ok(pages) => Response::new("200 OK", format.content_type(), Arc::clone(&pages[format])),
            Err(why) => Response::text("503 Service Unavailable", &why),
        })
    }

    fn bell(&self) -> &EventFd {
        self.asker.answered()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_its_path_and_what_it_accepts() {
        let asker = Asker::start(|()| Err("nobody is there".to_owned())).unwrap();
        let service = Metrics { asker, is_public: false };
        let format = |text: &str| match service.begin(&http::request(text), true) {
            Begun::Pending((format, _), _) => Ok(format),
            Begun::Answered(response) => Err(response.status),
        };
        assert_eq!(format("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), Ok(Format::Text));
        assert_eq!(format("GET /metrics?x=y HTTP/1.0\n\n"), Ok(Format::Text));
        let both = "HEAD /metrics HTTP/1.1\r\naCCept: text/plain;q=0.1\r\nAccept:application/openmetrics-text\r\n\r\n";
        assert_eq!(format(both), Ok(Format::OpenMetrics));
        assert_eq!(format("GET /etc/passwd HTTP/1.1\r\n\r\n"), Err("404 Not Found"));
    }

    #[test]
    fn other_sites_read_nothing() {
        let allowed = |fields: &str, is_public, is_unix| {
            let asker = Asker::start(|()| Err("nobody is there".to_owned())).unwrap();
            let request = http::request(&format!("GET /metrics HTTP/1.1\r\n{fields}\r\n"));
            matches!(Metrics { asker, is_public }.begin(&request, is_unix), Begun::Pending(..))
        };
        for host in ["", "Host: 127.0.0.1:9482\r\n", "Host: localhost\r\n"] {
            assert!(allowed(host, false, false), "{host}");
        }
        let evil = "Host: evil.example\r\n";
        assert!(!allowed(evil, false, false));
        assert!(
            allowed(evil, false, true) && allowed(evil, true, false),
            "a proxy's name, and another host's"
        );
        let foreign = "Host: 127.0.0.1\r\nSec-Fetch-Site: cross-site\r\n";
        assert!(!allowed(foreign, false, false) && !allowed(foreign, true, false));
    }
}
