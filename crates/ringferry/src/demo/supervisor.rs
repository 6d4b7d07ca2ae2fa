//! The demo's children: started, listened to, and ended whatever happens.
//!
//! The [`Supervisor`] owns every child process. A thread per pipe turns what children say into events, and
//! one more does so for signals; the main thread is the only one that acts on them. It is also the only one
//! that starts children, because a child dies with the *thread* that started it. Dropping the supervisor
//! ends all of them.

use super::Error;
use ringferry_sys::process::{self, Spawn};
use ringferry_sys::signal::{Signal, Signals};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

/// Lines of its error output kept of each child.
const TAIL: usize = 20;
/// How long a child may take to end after SIGTERM before it is killed.
const GRACE: Duration = Duration::from_secs(2);
/// How often ending children are looked at.
const LOOK: Duration = Duration::from_millis(5);
/// The number of the descriptor on which a child says that it is ready.
const READY_FD: i32 = 3;

/// A child, for as long as the supervisor lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(usize);

/// The network namespace a child starts in.
pub enum Place {
    /// The demo's own namespace.
    Here,
    /// A new namespace.
    New,
    /// An existing namespace.
    Join(OwnedFd),
}

/// A process to start, and how.
pub struct Start {
    /// For messages: "guest a".
    pub name: &'static str,
    pub place: Place,
    /// The command line after the program's name.
    pub arguments: Vec<OsString>,
    /// The demo cannot go on once it has ended.
    pub essential: bool,
    /// True if it takes `--ready-fd`.
    pub tells_ready: bool,
}

/// A child that ended as it should, sooner or later.
pub struct Ended {
    pub status: ExitStatus,
    /// All of its output.
    pub output: String,
}

enum Event {
    Signal(Signal),
    Ready(Id),
    Line(Id, String),
    Output(Id, String),
    /// Closed its error output, which a child does by ending.
    Ended(Id),
}

struct Running {
    name: &'static str,
    process: Child,
    essential: bool,
    ready: bool,
    ended: bool,
    output: Option<String>,
    tail: VecDeque<String>,
}

impl Running {
    fn tail(&self) -> String {
        if self.tail.is_empty() {
            return "it printed nothing".into();
        }
        let lines: Vec<&str> = self.tail.iter().map(String::as_str).collect();
        format!("its last lines:\n    {}", lines.join("\n    "))
    }
}

/// The owner of all children, which ends them.
pub struct Supervisor {
    program: PathBuf,
    children: Vec<Running>,
    events: Receiver<Event>,
    sender: Sender<Event>,
}

impl Supervisor {
    /// Starts to watch for signals. From here on SIGINT, SIGTERM and SIGHUP are errors of the calls below,
    /// so call it before other threads start.
    pub fn new() -> Result<Self, Error> {
        let program = std::env::current_exe().map_err(Error::setup("finding this program's file"))?;
        let signals = Signals::new(&[Signal::INT, Signal::TERM, Signal::HUP])
            .map_err(Error::setup("watching for signals"))?;
        let (sender, events) = channel();
        let to_main = sender.clone();
        std::thread::spawn(move || {
            loop {
                // An interrupted poll is repeated; it has no other error here.
                let _ = poll(&mut [PollFd::new(&signals, PollFlags::IN)], None);
                if let Ok(Some(signal)) = signals.next()
                    && to_main.send(Event::Signal(signal)).is_err()
                {
                    return;
                }
            }
        });
        Ok(Self { program, children: Vec::new(), events, sender })
    }

    /// Starts this program once more.
    pub fn start(&mut self, start: Start) -> Result<Id, Error> {
        let id = Id(self.children.len());
        let mut command = Command::new(&self.program);
        // In a process group of its own: Ctrl-C on the terminal is for the demo, which then ends its
        // children in good order.
        command
            .args(start.arguments)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut options = Spawn { die_with_parent: true, ..Spawn::default() };
        match start.place {
            Place::Here => {}
            Place::New => options.new_net = true,
            Place::Join(net) => options.join_net = Some(net),
        }
        let mut ready = None;
        if start.tells_ready {
            let (read, write) =
                pipe_with(PipeFlags::CLOEXEC).map_err(|error| Error::setup("making a pipe")(error.into()))?;
            command.arg("--ready-fd").arg(READY_FD.to_string());
            options.keep_fds.push((write, READY_FD));
            ready = Some(File::from(read));
        }
        let mut process = process::spawn(&mut command, options)
            .map_err(|source| Error::Start { name: start.name, source })?;
        let (stdout, stderr) = (process.stdout.take(), process.stderr.take());
        self.children.push(Running {
            name: start.name,
            process,
            essential: start.essential,
            ready: false,
            ended: false,
            output: None,
            tail: VecDeque::new(),
        });
        if let Some(pipe) = ready {
            self.listen(move |send| {
                if BufReader::new(pipe)
                    .lines()
                    .next()
                    .is_some_and(|line| line.is_ok_and(|line| line == "READY"))
                {
                    send(Event::Ready(id));
                }
            });
        }
        if let Some(mut pipe) = stdout {
            self.listen(move |send| {
                let mut bytes = Vec::new();
                // What came before an error is still worth having.
                let _ = pipe.read_to_end(&mut bytes);
                send(Event::Output(id, String::from_utf8_lossy(&bytes).into_owned()));
            });
        }
        if let Some(pipe) = stderr {
            self.listen(move |send| {
                for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
                    send(Event::Line(id, String::from_utf8_lossy(&line).trim_end().to_owned()));
                }
                send(Event::Ended(id));
            });
        }
        Ok(id)
    }

    fn listen(&self, read: impl FnOnce(&dyn Fn(Event)) + Send + 'static) {
        let sender = self.sender.clone();
        // When nobody receives any more, the demo is over and the child is being ended.
        std::thread::spawn(move || read(&|event| drop(sender.send(event))));
    }

    /// Handles events until `deadline` or until one concerns the caller, which then gets the child and its
    /// line, if it was one.
    fn next(&mut self, deadline: Instant) -> Result<Option<(Id, Option<String>)>, Error> {
        let event = match self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return Ok(None),
        };
        Ok(Some(match event {
            Event::Signal(signal) => return Err(Error::Interrupted(signal)),
            Event::Ready(id) => {
                self.children[id.0].ready = true;
                (id, None)
            }
            Event::Output(id, text) => {
                self.children[id.0].output = Some(text);
                (id, None)
            }
            Event::Line(id, line) => {
                let tail = &mut self.children[id.0].tail;
                if tail.len() == TAIL {
                    tail.pop_front();
                }
                tail.push_back(line.clone());
                (id, Some(line))
            }
            Event::Ended(id) => {
                let child = &mut self.children[id.0];
                child.ended = true;
                if child.essential {
                    let status = child.process.wait().map_err(Error::setup("waiting for a child"))?;
                    return Err(Error::Died { name: child.name, status, tail: child.tail() });
                }
                (id, None)
            }
        }))
    }

    /// Waits until `id` is ready, `limit` at most.
    pub fn until_ready(&mut self, id: Id, limit: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + limit;
        while !self.children[id.0].ready {
            if self.next(deadline)?.is_none() {
                let child = &self.children[id.0];
                return Err(Error::Late {
                    name: child.name,
                    seconds: limit.as_secs(),
                    what: "was not ready",
                    tail: child.tail(),
                });
            }
        }
        Ok(())
    }

    /// Waits until `id` has ended, `limit` at most. `on_line` hears each line of its error output.
    pub fn finish(&mut self, id: Id, limit: Duration, on_line: &mut dyn FnMut(&str)) -> Result<Ended, Error> {
        let deadline = Instant::now() + limit;
        while !self.children[id.0].ended || self.children[id.0].output.is_none() {
            match self.next(deadline)? {
                Some((about, Some(line))) if about == id => on_line(&line),
                Some(_) => {}
                None => {
                    self.stop(&[id]);
                    let child = &self.children[id.0];
                    return Err(Error::Late {
                        name: child.name,
                        seconds: limit.as_secs(),
                        what: "had not finished",
                        tail: child.tail(),
                    });
                }
            }
        }
        let child = &mut self.children[id.0];
        let status = child.process.wait().map_err(Error::setup("waiting for a child"))?;
        Ok(Ended { status, output: child.output.take().unwrap_or_default() })
    }

    /// Does nothing for `time` but watch.
    pub fn watch(&mut self, time: Duration) -> Result<(), Error> {
        let deadline = Instant::now() + time;
        while self.next(deadline)?.is_some() {}
        Ok(())
    }

    /// The process number of `id`.
    pub fn pid(&self, id: Id) -> u32 {
        self.children[id.0].process.id()
    }

    /// Ends these children: all are asked, and those that do not listen are killed.
    fn stop(&mut self, ids: &[Id]) {
        let mut left: Vec<&mut Child> = Vec::new();
        for (index, child) in self.children.iter_mut().enumerate() {
            if ids.contains(&Id(index)) && !matches!(child.process.try_wait(), Ok(Some(_))) {
                // Fails only for a child that has become another user, and then the kill below fails as well.
                let _ = process::terminate(&mut child.process);
                left.push(&mut child.process);
            }
        }
        let deadline = Instant::now() + GRACE;
        while !left.is_empty() && Instant::now() < deadline {
            std::thread::sleep(LOOK);
            left.retain_mut(|process| !matches!(process.try_wait(), Ok(Some(_))));
        }
        for process in left {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        let all: Vec<Id> = (0..self.children.len()).map(Id).collect();
        self.stop(&all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    /// A supervisor that starts a shell in place of this program.
    fn supervisor() -> Supervisor {
        let mut supervisor = Supervisor::new().unwrap();
        supervisor.program = "sh".into();
        supervisor
    }

    fn shell(script: &str, essential: bool, tells_ready: bool) -> Start {
        let arguments = ["-c", script].map(OsString::from).to_vec();
        Start { name: "the child", place: Place::Here, arguments, essential, tells_ready }
    }

    #[test]
    fn a_child_is_heard_to_its_end() {
        let mut supervisor = supervisor();
        let id =
            supervisor.start(shell("echo result; echo one >&2; echo two >&2; exit 3", false, false)).unwrap();
        let mut lines = Vec::new();
        let ended = supervisor.finish(id, LIMIT, &mut |line| lines.push(line.to_owned())).unwrap();
        assert_eq!((ended.status.code(), ended.output.as_str()), (Some(3), "result\n"));
        assert_eq!(lines, ["one", "two"]);
        let tail = supervisor.children[id.0].tail();
        assert!(tail.ends_with("one\n    two"), "{tail}");
    }

    #[test]
    fn readiness_is_told_through_the_descriptor() {
        let mut supervisor = supervisor();
        let id = supervisor.start(shell("echo READY >&3; exec sleep 1000", true, true)).unwrap();
        supervisor.until_ready(id, LIMIT).unwrap();
        let id = supervisor.start(shell("echo starting >&2; exec sleep 1000", true, true)).unwrap();
        let error = supervisor.until_ready(id, Duration::from_millis(300)).unwrap_err().to_string();
        assert!(error.starts_with("the child was not ready") && error.ends_with("starting"), "{error}");
    }

    #[test]
    fn the_death_of_an_essential_child_is_an_error_with_its_last_words() {
        let mut supervisor = supervisor();
        supervisor.start(shell("seq 100 >&2; echo out of memory >&2; exit 7", true, false)).unwrap();
        let error = supervisor.watch(LIMIT).unwrap_err();
        assert!(matches!(&error, Error::Died { status, .. } if status.code() == Some(7)), "{error}");
        let text = error.to_string();
        assert!(text.ends_with("100\n    out of memory") && text.lines().count() == TAIL + 1, "{text}");
    }

    #[test]
    fn a_child_that_takes_too_long_is_ended() {
        let mut supervisor = supervisor();
        let id = supervisor.start(shell("exec sleep 1000", false, false)).unwrap();
        let error = supervisor.finish(id, Duration::from_millis(50), &mut |_| {}).err().unwrap();
        assert!(matches!(error, Error::Late { .. }), "{error}");
        assert!(supervisor.children[id.0].process.try_wait().unwrap().is_some());
    }

    #[test]
    fn dropping_the_supervisor_ends_willing_and_unwilling_children() {
        let mut supervisor = supervisor();
        let willing = supervisor.start(shell("exec sleep 1000", true, false)).unwrap();
        let script = "trap '' TERM; echo READY >&3; while :; do sleep 0.1; done";
        let unwilling = supervisor.start(shell(script, true, true)).unwrap();
        supervisor.until_ready(unwilling, LIMIT).unwrap();
        let pids = [willing, unwilling].map(|id| supervisor.pid(id));
        drop(supervisor);
        for pid in pids {
            assert!(process::cpu_time(pid).is_err(), "process {pid} is still there");
        }
    }
}
