//! `ringferry ctl denials`: what firewalls have denied, a line of JSON each.

use std::io::{self, Write};
use std::time::{Duration, SystemTime};

use ringferry_control::firewall::DenialCursor;
use ringferry_control::{Answer, ControlError, Request};

use super::{CtlError, Switch};

/// How often a follower asks: a worker keeps what was denied in two seconds at least.
const INTERVAL: Duration = Duration::from_millis(500);

/// Prints what was denied, and with `follow` goes on until whoever reads has gone.
///
/// # Errors
/// No switch answers, or the port has no firewall; with `follow` that is so at the beginning.
pub(super) fn print(
    switch: &Switch,
    port: Option<&str>,
    follow: bool,
    out: &mut dyn Write,
) -> Result<(), CtlError> {
    let (mut since, mut missed, mut is_first) = (DenialCursor::new(), 0, true);
    loop {
        let request = Request::Denials { port: port.map(str::to_owned), since: since.clone() };
        let denials = match switch.call(&request) {
            Ok(Answer::Denials(denials)) => denials,
            Ok(_) => return Err(CtlError::Mismatch),
            // It comes back, or another process is taking over.
            Err(ControlError::NotRunning(_) | ControlError::Os { .. }) if follow && !is_first => {
                std::thread::sleep(INTERVAL);
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
        let text = denials.to_lines(now).map_err(io::Error::from)?;
        match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            written => written?,
        }
        if denials.missed > missed && !is_first {
            eprintln!("ringferry: {} denials were too many to be told", denials.missed - missed);
        }
        if !follow {
            return Ok(());
        }
        // The first number is that of the list: another process, or another policy, has another.
        let is_other = |(port, seen): (&String, &Vec<u64>)| {
            denials.next.get(port).is_some_and(|next| next.first() != seen.first())
        };
        if since.iter().any(is_other) {
            eprintln!(
                "ringferry: the switch or a policy was replaced: denials of the last half second before may be missing"
            );
        }
        (since, missed, is_first) = (denials.next, denials.missed, false);
        std::thread::sleep(INTERVAL);
    }
}
