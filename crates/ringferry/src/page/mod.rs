//! `ringferry page`: what `top` shows, for a browser on this host. Read-only.
//!
//! **A process of its own**, as `metrics` is, with the same server (http): it asks the switch on its control socket. The page itself is three files that never change and are part of the program; a script
//! fetches the figures as JSON (`/state`, `/why?port=`) and puts them into the page as text, so no name of a port is ever markup.
//!
//! **Who may read it.** It listens at loopback or at a Unix socket, and every user of this host can connect to loopback: what can be read there is what `ctl show` says. Packets are another matter, so captures are
//! served only where `--captures` says so. A page of somebody else's in the same browser reads nothing: a request must name this host by its address or as `localhost` (against DNS
//! rebinding, by which a foreign name leads to loopback), no answer has CORS fields, and one that says it comes from another site (`Sec-Fetch-Site`) is refused. The page may run and load only what
//! comes from here (Content-Security-Policy), and may not be framed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ringferry_control::snapshot::Snapshot;
use ringferry_control::{self as control, Answer, ControlError, DropReason, Patience, Request};
use ringferry_sys::eventfd::EventFd;
use ringferry_sys::signal::{Signal, Signals};
use serde::Serialize;

use crate::http::{self, Asker, Begun, Endpoint, Response, ServeError, Server, Service, Socket};
use ringferry_sys::ready::{Ready, ReadyError};

/// The files of the page: path, type, content.
const FILES: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("index.html")),
    ("/page.js", "text/javascript; charset=utf-8", include_str!("page.js")),
    ("/page.css", "text/css; charset=utf-8", include_str!("page.css")),
];

/// Fields of every answer.
const FIELDS: &str = "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'\r\n\
                      Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Frame-Options: DENY\r\nReferrer-Policy: no-referrer\r\nCross-Origin-Resource-Policy: same-origin\r\n";

/// Where to listen unless something else is said: the port after that of the examples for `metrics`.
const DEFAULT: &str = "127.0.0.1:9483";
/// Addresses of the forwarding database that are passed on.
const ADDRESSES: usize = 1000;
/// Captures at a time, and bytes that one may have: what is beyond them ends it, in memory that is held until it was downloaded.
const CAPTURES: usize = 2;
/// For so long each holds its place at least: to begin one costs the switch more than to make it.
const SHORTEST: Duration = Duration::from_secs(1);
const CAPTURE_BYTES: usize = 32 << 20;
/// Seconds that a capture takes, unless another number is asked for, and at most.
const SECONDS: u64 = 10;
const MOST_SECONDS: u64 = 60;
/// How long a download may take.
const DOWNLOAD: Duration = Duration::from_secs(60);

/// Shown below the options by `ringferry page --help`.
const EXAMPLES: &str = "\
There is neither encryption nor a password, and every user of this host can connect to loopback. For another host forward the port:
ssh -L 9483:127.0.0.1:9483 HOST. What can be read is what `ringferry ctl show` and `why` say; packets only with --captures.

Examples:
  ringferry page                                    at http://127.0.0.1:9483/
  ringferry page --captures                         with captures of ten seconds to download
  ringferry page --listen /run/ringferry/page.sock  for a proxy that asks for a password";

/// Serves a page with what a running switch does now, for a browser.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct PageArgs {
    /// Where to listen: an address and a port, or the path of a Unix socket. May be given several times.
    #[arg(long, value_name = "ADDRESS:PORT|PATH", default_value = DEFAULT)]
    listen: Vec<Endpoint>,

    /// Allow addresses other than loopback, at which other hosts can read the page.
    #[arg(long, conflicts_with = "captures")]
    public: bool,

    /// Serve captures of a port's packets to whoever can connect.
    #[arg(long)]
    captures: bool,

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
    /// A socket cannot be had.
    #[error(transparent)]
    Serve(#[from] ServeError),
    /// The descriptor of --ready-fd is none.
    #[error(transparent)]
    Ready(#[from] ReadyError),
    /// The system has no descriptors or threads left.
    #[error(transparent)]
    Os(#[from] io::Error),
}

/// Serves until SIGTERM or SIGINT, whether there is a switch or not.
///
/// # Errors
/// See [`enum@Error`].
pub fn run(args: &PageArgs) -> Result<(), Error> {
    let control = args.control.clone().unwrap_or_else(control::default_path);
    let ready = args.ready_fd.map(Ready::take).transpose()?;
    let signals = Signals::new(&[Signal::TERM, Signal::INT])?;
    let mut server = Server::new(Page::start(control, args.captures)?)?;
    for endpoint in &args.listen {
        let socket = Socket::bind(endpoint, args.public)?;
        let what = match &socket {
            Socket::Tcp(_) => format!("the page is served: http://{}/", socket.name()?),
            Socket::Unix(..) => "the page is served".to_owned(),
        };
        server.listen(socket, &what)?;
    }
    if let Some(ready) = ready {
        ready.say();
    }
    Ok(server.serve(&signals)?)
}

/// A question to the switch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Question {
    State,
    /// Why a port is slow.
    Why(String),
}

/// JSON, or a status and why there is none.
type Json = Result<Arc<[u8]>, (&'static str, String)>;

/// An answer of the switch: JSON and, of its state, the names of its ports.
type Answered = (Json, Arc<[String]>);

/// What the script is told: a snapshot, with what it needs to explain it.
#[derive(Serialize)]
struct State {
    #[serde(flatten)]
    snapshot: Snapshot,
    /// Addresses in the forwarding database, of which the snapshot has the first [`ADDRESSES`].
    addresses: u64,
    /// What happened and what to do, for each reason that there are drops for.
    reasons: BTreeMap<&'static str, String>,
    /// Whether captures are served.
    may_capture: bool,
}

impl State {
    fn of(snapshot: Snapshot, may_capture: bool) -> State {
        let dropped = snapshot.ports.iter().flat_map(|port| &port.drops).filter(|(_, count)| **count > 0);
        let reasons = dropped
            .filter_map(|(name, _)| DropReason::from_name(name))
            .map(|reason| (reason.name(), format!("{} What to do: {}", reason.meaning(), reason.remedy())));
        State { addresses: snapshot.fdb.addresses(), reasons: reasons.collect(), may_capture, snapshot }
    }
}

/// Asks the switch.
fn ask(control: &Path, question: &Question, captures: bool) -> Answered {
    let unavailable = |why: &dyn std::fmt::Display| ("503 Service Unavailable", why.to_string());
    let json = |made: serde_json::Result<Vec<u8>>| made.map(Into::into).map_err(|error| unavailable(&error));
    let request = match question {
        Question::State => Request::Show { addresses: Some(ADDRESSES) },
        Question::Why(port) => Request::Why { port: port.clone(), peer: None },
    };
    let mut ports = Arc::default();
    let answer = match control::call_with(control, &request, Patience::SHORT) {
        Ok(Answer::Show(snapshot)) => {
            ports = snapshot.ports.iter().map(|port| port.name.clone()).collect();
            json(serde_json::to_vec(&State::of(*snapshot, captures)))
        }
        Ok(Answer::Why(diagnosis)) => json(serde_json::to_vec(&diagnosis)),
        Ok(_) => Err(unavailable(&"this is the control socket of a ringferry guest, which has no ports")),
        Err(ControlError::Refused(why)) => Err(("404 Not Found", why)),
        Err(error) => Err(unavailable(&error)),
    };
    (answer, ports)
}

/// What is served.
struct Page {
    control: PathBuf,
    asker: Asker<Question, Answered>,
    /// Captures that run, or wait to be downloaded; `None` if there are none to be had.
    captures: Option<Arc<AtomicUsize>>,
}

/// One of the captures that may be at a time.
struct Permit(Arc<AtomicUsize>);

impl Permit {
    fn take(captures: &Arc<AtomicUsize>) -> Option<Permit> {
        let permit = Permit(Arc::clone(captures));
        (captures.fetch_add(1, Ordering::Relaxed) < CAPTURES).then_some(permit)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The file of a capture, or why there is none, once it is over.
type Made = Option<Result<Vec<u8>, String>>;

/// A capture that runs in a thread of its own; it ends when this is dropped.
struct Capture {
    port: String,
    file: Arc<Mutex<Made>>,
    is_over: Arc<AtomicBool>,
    permit: Arc<Permit>,
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
    }
}

/// What a client waits for.
enum Pending {
    Answer(Question, Instant),
    Capture(Capture),
}

impl Page {
    fn start(control: PathBuf, captures: bool) -> io::Result<Page> {
        let path = control.clone();
        let asker = Asker::start(move |question| ask(&path, question, captures))?;
        Ok(Page { control, asker, captures: captures.then(Arc::default) })
    }

    /// Returns the answer to a question, once there is one. The switch is not asked about ports that it has not: there are more names than it has time, and whoever asks for the state
    /// would wait behind them.
    fn answer(&self, question: &Question, since: Instant) -> Option<Json> {
        if let Question::Why(port) = question {
            let (state, ports) = self.asker.get(&Question::State, since)?;
            if state.is_err() {
                return Some(state);
            }
            if !ports.contains(port) {
                return Some(Err(("404 Not Found", format!("there is no port {port:?}"))));
            }
        }
        self.asker.get(question, since).map(|(json, _)| json)
    }

    /// Begins to capture a port.
    fn capture(&self, request: &http::Request) -> Begun<Pending> {
        let Some(captures) = &self.captures else {
            return Begun::Answered(Response::text(
                "403 Forbidden",
                "captures are served only with --captures",
            ));
        };
        let seconds = request.parameter("seconds").map_or(Ok(SECONDS), |text| text.parse());
        let (Some(port), Ok(seconds @ 1..=MOST_SECONDS)) = (request.parameter("port"), seconds) else {
            return Begun::Answered(Response::refused("400 Bad Request"));
        };
        if request.is_head {
            return Begun::Answered(Response::other_method("GET"));
        }
        let Some(permit) = Permit::take(captures) else {
            return Begun::Answered(Response::text(
                "503 Service Unavailable",
                "too many captures are being made already",
            ));
        };
        let time = Duration::from_secs(seconds);
        match self.start_capture(port, time, permit) {
            Ok(capture) => Begun::Pending(Pending::Capture(capture), time + DOWNLOAD),
            Err(error) => Begun::Answered(Response::text("503 Service Unavailable", &error.to_string())),
        }
    }

    fn start_capture(&self, port: String, time: Duration, permit: Permit) -> io::Result<Capture> {
        let capture =
            Capture { port, file: Arc::default(), is_over: Arc::default(), permit: Arc::new(permit) };
        let (control, bell) = (self.control.clone(), Arc::clone(self.asker.answered()));
        let (port, file, is_over) =
            (capture.port.clone(), Arc::clone(&capture.file), Arc::clone(&capture.is_over));
        let permit = Arc::clone(&capture.permit);
        let began = Instant::now();
        thread::Builder::new().name("capture".to_owned()).spawn(move || {
            let over = || is_over.load(Ordering::Relaxed);
            let made = crate::capture::to_memory(&control, &port, time, CAPTURE_BYTES, over);
            if let Ok(mut file) = file.lock() {
                *file = Some(made.map_err(|error| error.to_string()));
            }
            let _ = bell.signal();
            // Whoever begins one after the other begins one a second.
            thread::sleep(SHORTEST.saturating_sub(began.elapsed()));
            drop(permit);
        })?;
        Ok(capture)
    }
}

/// Returns true if a request may be answered: see the head of this file.
fn is_allowed(request: &http::Request, is_unix: bool) -> bool {
    // To follow a link to the page is to open it, and it can be read by nobody who has set the link.
    request.names_this_host(is_unix) && (request.is_of_same_site() || request.path == "/")
}

/// The name of a file for a port: no path, and nothing that would have to be quoted.
fn file_name(port: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '_' };
    port.chars().take(64).map(plain).collect::<String>() + ".pcapng"
}

impl Service for Page {
    type Pending = Pending;

    const FIELDS: &str = FIELDS;

    fn begin(&self, request: &http::Request, is_unix: bool) -> Begun<Pending> {
        if !is_allowed(request, is_unix) {
            return Begun::Answered(Response::text(
                "403 Forbidden",
                "this page is read by its address, as http://127.0.0.1:9483/, and from no other site",
            ));
        }
        if let Some((_, kind, content)) = FILES.iter().find(|(path, ..)| *path == request.path) {
            return Begun::Answered(Response::new("200 OK", kind, content.as_bytes()));
        }
        let question = match request.path.as_str() {
            "/state" => Question::State,
            "/why" => match request.parameter("port") {
                Some(port) => Question::Why(port),
                None => return Begun::Answered(Response::refused("400 Bad Request")),
            },
            "/capture" => return self.capture(request),
            _ => return Begun::Answered(Response::refused("404 Not Found")),
        };
        Begun::Pending(Pending::Answer(question, Instant::now()), Duration::ZERO)
    }

    fn poll(&self, pending: &Pending) -> Option<Response> {
        Some(match pending {
            Pending::Answer(question, since) => match self.answer(question, *since)? {
                Ok(json) => Response::new("200 OK", "application/json", json),
                Err((status, why)) => Response::text(status, &why),
            },
            Pending::Capture(capture) => match capture.file.lock().ok()?.take()? {
                Ok(file) => {
                    let name = file_name(&capture.port);
                    let fields = format!("Content-Disposition: attachment; filename=\"{name}\"\r\n");
                    let kept: Arc<dyn Send + Sync> = Arc::clone(&capture.permit) as _;
                    let file = Response::new("200 OK", "application/x-pcapng", file);
                    Response { fields, kept: Some(kept), ..file }
                }
                Err(why) => Response::text("503 Service Unavailable", &why),
            },
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
    fn other_sites_read_nothing() {
        let allowed = |text: &str, is_unix| is_allowed(&http::request(text), is_unix);
        let of =
            |path: &str, fields: &str| format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1:1\r\n{fields}\r\n");
        assert!(allowed(&of("/state", ""), false));
        assert!(allowed(&of("/state", "Sec-Fetch-Site: same-origin\r\n"), false));
        assert!(!allowed(&of("/state", "Sec-Fetch-Site: cross-site\r\n"), false));
        assert!(!allowed(&of("/capture?port=a", "sec-fetch-site: same-site\r\n"), true));
        assert!(allowed(&of("/", "Sec-Fetch-Site: cross-site\r\n"), false));
        assert!(!allowed(&of("/state", "Host: 127.0.0.1\r\n"), false), "two hosts");
        assert!(!allowed("GET / HTTP/1.0\r\n\r\n", false));
        assert!(!allowed("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", false));
        assert!(allowed("GET / HTTP/1.1\r\nHost: switch\r\n\r\n", true));
    }

    #[test]
    fn nothing_in_the_page_comes_from_elsewhere_or_is_markup() {
        let [(_, _, html), (_, _, script), (_, _, style)] = FILES;
        for (name, text) in [("html", html), ("css", style)] {
            assert!(!text.contains("//"), "{name} has an address");
        }
        let addresses: Vec<_> = script.match_indices("http").map(|(at, _)| &script[at..at + 26]).collect();
        assert_eq!(addresses, ["http://www.w3.org/2000/svg"], "the name of SVG, which nobody fetches");
        for sink in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("] {
            assert!(!script.contains(sink), "{sink}");
        }
        for inline in ["<style", " style=", " onclick=", "<script>"] {
            assert!(!html.contains(inline), "{inline} is forbidden by the policy");
        }
    }

    #[test]
    fn captures_are_few_and_files_have_plain_names() {
        let captures = Arc::default();
        let permits: Vec<_> = (0..CAPTURES).map(|_| Permit::take(&captures).unwrap()).collect();
        assert!(Permit::take(&captures).is_none());
        drop(permits);
        assert!(Permit::take(&captures).is_some());
        assert_eq!(file_name("vm0"), "vm0.pcapng");
        assert_eq!(file_name("../a\"\r\nb"), "___a___b.pcapng");
    }
}
