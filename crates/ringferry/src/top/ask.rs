//! Asks the switch for what a screen shows: one snapshot, and for the page of a port what `ctl why` says of it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::Instant;

use ringferry_control::snapshot::Snapshot;
use ringferry_control::why::Diagnosis;
use ringferry_control::{self as control, Answer, ControlError, Patience, Request};
use ringferry_sys::eventfd::EventFd;

/// What a screen is made of.
#[derive(Debug)]
pub struct Answered {
    pub snapshot: Snapshot,
    /// Why the port is slow that was asked about, or why that is not known: it may have gone.
    pub why: Option<Result<Diagnosis, String>>,
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error(
        "this is a ringferry guest, which has no ports: look at it with `ringferry ctl show --watch`, or ask the switch it is plugged into"
    )]
    Guest,
    #[error("ringferry answered another question: is it the same version as this program?")]
    Mismatch,
}

/// Addresses of the forwarding database that are looked at, each second: more than anybody scrolls through, and few enough that the switch has other things
/// to do than to list them. A million take it 0.65 s.
const ADDRESSES: usize = 10_000;

/// Asks once, and waits for the answer.
///
/// # Errors
/// See [`AskError`].
pub fn ask(control: &Path, port: Option<&str>) -> Result<Answered, AskError> {
    let snapshot =
        match control::call_with(control, &Request::Show { addresses: Some(ADDRESSES) }, Patience::SHORT)? {
            Answer::Show(snapshot) => *snapshot,
            Answer::Guest(_) => return Err(AskError::Guest),
            _ => return Err(AskError::Mismatch),
        };
    let why = port.map(|port| {
        match control::call_with(
            control,
            &Request::Why { port: port.to_owned(), peer: None },
            Patience::SHORT,
        ) {
            Ok(Answer::Why(diagnosis)) => Ok(Ok(diagnosis)),
            Ok(_) => Err(AskError::Mismatch),
            Err(ControlError::Refused(why)) => Ok(Err(why)),
            Err(error) => Err(error.into()),
        }
    });
    Ok(Answered { snapshot, why: why.transpose()? })
}

/// The thread that asks, which a switch that is stopped holds up, and the screen not.
pub struct Asker {
    questions: SyncSender<Option<String>>,
    answers: Receiver<Result<Answered, AskError>>,
    /// Readable when there is an answer.
    pub answered: Arc<EventFd>,
    /// When the question was asked that has no answer yet.
    pub since: Option<Instant>,
}

impl Asker {
    /// # Errors
    /// The system has no descriptors or threads left.
    pub fn start(control: PathBuf) -> io::Result<Asker> {
        let (questions, asked) = sync_channel::<Option<String>>(1);
        let (sender, answers) = sync_channel(1);
        let asker = Asker { questions, answers, answered: Arc::new(EventFd::new()?), since: None };
        let answered = Arc::clone(&asker.answered);
        thread::Builder::new().name("ask".to_owned()).spawn(move || {
            while let Ok(port) = asked.recv() {
                if sender.send(ask(&control, port.as_deref())).is_err() {
                    break;
                }
                // Its counter is far from full: it is emptied each time.
                let _ = answered.signal();
            }
        })?;
        Ok(asker)
    }

    /// Asks, about a port as well, unless an answer is still to come.
    pub fn ask(&mut self, port: Option<&str>) {
        if self.since.is_none() && self.questions.try_send(port.map(str::to_owned)).is_ok() {
            self.since = Some(Instant::now());
        }
    }

    /// Returns the answer, if it has come.
    ///
    /// # Errors
    /// The thread has ended.
    pub fn answer(&mut self) -> io::Result<Option<Result<Answered, AskError>>> {
        match self.answers.try_recv() {
            Ok(answer) => {
                self.since = None;
                self.answered.drain()?;
                Ok(Some(answer))
            }
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => {
                Err(io::Error::other("the thread that asks the switch has ended"))
            }
        }
    }
}
