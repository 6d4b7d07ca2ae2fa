//! What `ringferry guest` answers on its control socket.

use std::time::Instant;

use ringferry_control::GuestSnapshot;
use ringferry_control::channels::{Channels, QueueSteering, Stats, Steering};
use ringferry_control::snapshot::VERSION;
use ringferry_control::{Answer, Request, Response};
use ringferry_packet::flow::HashTypes;
use ringferry_virtio_net::Features;

use super::args::GuestArgs;
use super::counts::{Report, by_name};

/// What steers, for people.
const BY: &str = "what is sent takes the pair that its flow was last received on (automatic flow steering of the \
                  tap); what is received, the pair that the back end chooses";

/// The same while one pair is enough.
const BY_FIRST: &str = "all takes the first pair as long as that is enough (--spread-at)";

/// All that is known at one moment, counters aside.
pub(super) struct Status<'a> {
    pub(super) args: &'a GuestArgs,
    /// When the program began.
    pub(super) started: Instant,
    /// A back end serves it.
    pub(super) up: bool,
    /// The features agreed on.
    pub(super) features: Features,
    /// Most pairs.
    pub(super) max: u16,
    /// Pairs that may be used.
    pub(super) combined: u16,
    /// Of those, the ones that there is enough to do for.
    pub(super) used: u16,
    /// The processor of each pair that is set up; `None`: any.
    pub(super) cpus: &'a [Option<usize>],
}

impl Status<'_> {
    /// The answer to a request; a change it asks for was made before. `reports` tells the counters of each pair.
    pub(super) fn answer(
        &self,
        request: &Request,
        reports: impl FnOnce() -> Result<Vec<Report>, String>,
    ) -> Result<Answer, String> {
        let tap = &self.args.tap;
        if let Request::Channels { port, .. } | Request::Steering { port } | Request::Stats { port, .. } =
            request
            && port != tap
        {
            return Err(format!("there is no port {port:?}; this guest has one, {tap:?}"));
        }
        Ok(match request {
            Request::Show { .. } => Answer::Guest(Box::new(GuestSnapshot {
                version: VERSION,
                pid: std::process::id(),
                uptime_seconds: self.started.elapsed().as_secs(),
                port: tap.clone(),
                peer: self.args.socket.display().to_string(),
                up: self.up,
                features: self.features,
                channels: self.channels(),
                steering: self.steering(),
                stats: self.stats(&reports()?, true),
            })),
            Request::Dump => return Err("a guest has no configuration file; its options are its own".into()),
            Request::Channels { .. } => Answer::Channels(self.channels()),
            Request::Steering { .. } => Answer::Steering(self.steering()),
            Request::Assign { .. } => {
                return Err(
                    "a guest has a thread for each pair and no workers: ask the switch it is plugged into"
                        .into(),
                );
            }
            Request::Explain { .. } | Request::Why { .. } | Request::Diagnose | Request::Trace(_) => {
                return Err("a guest knows only its own end: ask the switch it is plugged into".into());
            }
            Request::Capture(_)
            | Request::Mirrors
            | Request::AddMirror { .. }
            | Request::RemoveMirror { .. } => {
                return Err("a guest captures and mirrors nothing: ask the switch it is plugged into".into());
            }
            Request::Wires { .. }
            | Request::SetWire { .. }
            | Request::ResetWire { .. }
            | Request::AddWire { .. }
            | Request::RemoveWire { .. } => {
                return Err("a guest has no wires: ask the switch it is plugged into".into());
            }
            Request::Link { .. } => {
                return Err("a guest has no ports: ask the switch it is plugged into".into());
            }
            Request::FlushFdb { .. } | Request::AddFdb { .. } | Request::RemoveFdb { .. } => {
                return Err("a guest has no forwarding database: ask the switch it is plugged into".into());
            }
            Request::Add { .. }
            | Request::Remove { .. }
            | Request::Reload { .. }
            | Request::Replace { .. } => {
                return Err(
                    "a guest has one port and no configuration file: ask the switch it is plugged into"
                        .into(),
                );
            }
            Request::Rules { .. }
            | Request::Firewall { .. }
            | Request::Firewalls
            | Request::Denials { .. }
            | Request::Set { .. }
            | Request::Unset { .. } => {
                return Err("a guest has no rules: ask the switch it is plugged into".into());
            }
            Request::Stats { queues, .. } => Answer::Stats(self.stats(&reports()?, *queues)),
        })
    }

    fn channels(&self) -> Channels {
        Channels {
            port: self.args.tap.clone(),
            max_combined: self.max,
            combined: self.combined,
            started: self.cpus.len() as u16,
        }
    }

    fn steering(&self) -> Steering {
        let queues = (0..).zip(self.cpus).map(|(queue, cpu)| QueueSteering {
            queue,
            enabled: queue < self.used,
            cpu: *cpu,
            worker: None,
        });
        // Over vhost-user a back end is told of no hash: it steers as it sees fit.
        Steering {
            port: self.args.tap.clone(),
            by: if self.used == self.combined { BY } else { BY_FIRST }.to_owned(),
            hash_types: HashTypes::empty(),
            queues: queues.collect(),
            kept: None,
        }
    }

    fn stats(&self, reports: &[Report], queues: bool) -> Stats {
        Stats { port: self.args.tap.clone(), counters: by_name(reports, queues) }
    }
}

/// Refuses a number of pairs that cannot be.
pub(super) fn check_range(wanted: u16, max: u16) -> Result<(), String> {
    if (1..=max).contains(&wanted) {
        Ok(())
    } else {
        Err(format!("{wanted} queue pairs are not between 1 and {max}; nothing has changed"))
    }
}

/// An answer, or why there is none.
pub(super) fn respond(answer: Result<Answer, String>) -> Response {
    answer.map_or_else(Response::Error, Response::Ok)
}
