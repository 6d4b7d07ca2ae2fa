//! Ports that are drained before they are removed: `ringferry ctl remove --drain`.
//!
//! The switch keeps one [`Drains`]. A drain begins when it is asked for: from then on no frames are sent to the port and no further front end is served,
//! while what its guest sends is forwarded, and what is queued for it goes out. The control plane's loop calls [`Drains::due`] at each
//! [deadline](Drains::deadline): every worker is asked, and not waited for, whether something of the port waits there. A drain is over when all
//! have said twice in a row that nothing does, or when its time is up: a guest that goes on sending is not waited for. The client is answered then.

use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use ringferry_control::Ticket;

use crate::ports::table::{EntryId, PortTable};

/// Time between two questions to the workers.
const INTERVAL: Duration = Duration::from_millis(10);

/// How often in a row all workers must have nothing of a port. A frame may be on its way from one that has answered to one that has, too.
const QUIET: u32 = 2;

/// The ports that are drained.
#[derive(Default)]
pub(crate) struct Drains(Vec<Drain>);

/// A port that is drained.
struct Drain {
    over: Drained,
    entry: EntryId,
    until: Instant,
    next: Instant,
    /// Answers that are awaited, and whether one was that something waits.
    asked: Vec<Receiver<bool>>,
    is_quiet: bool,
    /// How often in a row nothing waited.
    quiet: u32,
}

/// A port that is to be removed now.
#[derive(Clone, Debug)]
pub(crate) struct Drained {
    pub(crate) port: String,
    pub(crate) runtime: bool,
    /// Whom to answer.
    pub(crate) ticket: Ticket,
    /// The most seconds that it might take.
    pub(crate) seconds: u16,
    /// True if nothing waited any more.
    pub(crate) is_empty: bool,
    /// True if somebody else has removed it meanwhile.
    pub(crate) is_gone: bool,
}

impl Drains {
    /// Begins to drain an entry, for `seconds` at most.
    pub(crate) fn begin(&mut self, entry: EntryId, port: &str, runtime: bool, ticket: Ticket, seconds: u16) {
        let now = Instant::now();
        self.0.push(Drain {
            over: Drained {
                port: port.to_owned(),
                runtime,
                ticket,
                seconds,
                is_empty: false,
                is_gone: false,
            },
            entry,
            until: now + Duration::from_secs(seconds.into()),
            next: now,
            asked: Vec::new(),
            is_quiet: false,
            quiet: 0,
        });
    }

    /// Returns the time at which [`due`](Self::due) has something to do.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.0.iter().map(|drain| drain.next.min(drain.until)).min()
    }

    /// Asks the workers again, and returns the drains that are over: all is empty, the time is up, or the port has gone.
    pub(crate) fn due(&mut self, now: Instant, ports: &PortTable) -> Vec<Drained> {
        self.0.extract_if(.., |drain| drain.is_over(now, ports)).map(|drain| drain.over).collect()
    }
}

impl Drain {
    fn is_over(&mut self, now: Instant, ports: &PortTable) -> bool {
        self.over.is_gone = !ports.has(self.entry);
        if self.over.is_gone || now >= self.until {
            return true;
        }
        if now < self.next {
            return false;
        }
        self.next = now + INTERVAL;
        let is_quiet = &mut self.is_quiet;
        self.asked.retain(|answer| match answer.try_recv() {
            Ok(quiet) => {
                *is_quiet &= quiet;
                false
            }
            Err(error) => error == TryRecvError::Empty,
        });
        if !self.asked.is_empty() {
            return false;
        }
        self.quiet = if self.is_quiet { self.quiet + 1 } else { 0 };
        self.over.is_empty = self.quiet >= QUIET;
        self.is_quiet = true;
        self.asked = ports.ask_quiet(self.entry);
        self.over.is_empty
    }
}
