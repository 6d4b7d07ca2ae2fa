//! The firewall of a port: asks the crate `firewall` about frames where they lie, or in a private copy.
//!
//! The control plane makes one when a port's rules name a policy, and another when the policy changes, which goes on with the flows of the one before. All workers
//! share it: that of a sender asks what its guest may send, and whichever has a frame for the port asks whether that may come in.

use std::sync::Arc;

use ringferry_firewall::{Direction, Firewall, HEAD, Verdict, View};
use ringferry_packet::frame::{Burst, Frame, PREFIX};

use super::{Here, Refusal};
use crate::counters::DropReason;
use crate::plane::now::Now;
use crate::rules::FirewallRule;

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct PortFirewall {
    /// None where the policy could not be read: nothing passes.
    firewall: Option<Arc<Firewall>>,
}

impl PortFirewall {
    /// Makes the firewall that a rule asks for. If the policy is that of the firewall `before`, it is the same one.
    pub(crate) fn new(rule: &FirewallRule, before: Option<&PortFirewall>, here: Here) -> PortFirewall {
        let before = before.and_then(|before| before.firewall.as_ref());
        let firewall = rule.policy.as_ref().map(|policy| match before {
            Some(before) if before.policy() == policy => Arc::clone(before),
            Some(before) => Arc::new(before.following(Arc::clone(policy), here.workers, here.now, seed())),
            None => Arc::new(Firewall::new(Arc::clone(policy), here.workers, seed())),
        });
        PortFirewall { firewall }
    }

    /// Returns the firewall itself, for whoever tells of it.
    pub(crate) fn inner(&self) -> Option<&Arc<Firewall>> {
        self.firewall.as_ref()
    }

    /// Judges a frame that the port's guest has sent (out) or that is for it (in).
    ///
    /// # Errors
    /// It is to be dropped, or judged again in a private copy: see [`Refusal`].
    #[inline]
    pub(crate) fn judge(
        &self,
        direction: Direction,
        burst: &Burst<'_>,
        frame: &Frame,
        private: bool,
        now: &Now,
        worker: usize,
    ) -> Result<(), Refusal> {
        let Some(firewall) = &self.firewall else { return Err(DENIED) };
        let len = frame.len as usize;
        let peek = |at| peek(burst, frame, at);
        let view = View { header: &frame.header, bytes: frame.prefix(), len, peek: &peek };
        match firewall.judge(direction, view, now.seconds, worker) {
            Verdict::Pass => Ok(()),
            Verdict::Deny(_) => Err(DENIED),
            Verdict::Beyond if !private => Err(Refusal::Unstable),
            Verdict::Beyond => {
                let (head, have) = head(burst, frame);
                let view = View { header: &frame.header, bytes: &head[..have], len, peek: &|_| None };
                match firewall.judge(direction, view, now.seconds, worker) {
                    Verdict::Pass => Ok(()),
                    Verdict::Deny(_) | Verdict::Beyond => Err(DENIED),
                }
            }
        }
    }

    /// Has the processor fetch what will be read for these frames of a burst, if there are so many flows that it is worth it.
    #[inline]
    pub(crate) fn fetch<'f>(&self, direction: Direction, frames: impl Iterator<Item = &'f Frame>) {
        if let Some(firewall) = self.firewall.as_ref().filter(|firewall| firewall.is_large()) {
            for frame in frames {
                let (header, bytes, len) = (&frame.header, frame.prefix(), frame.len as usize);
                firewall.fetch(direction, View { header, bytes, len, peek: &|_| None });
            }
        }
    }

    /// Returns the frame by which a question of the guest's is answered that was denied, if it was one for a name.
    #[cold]
    pub(crate) fn refusal(&self, burst: &Burst<'_>, frame: &Frame) -> Option<Vec<u8>> {
        let firewall = self.firewall.as_ref()?;
        if !firewall.refuses_names() {
            return None;
        }
        let (head, have) = head(burst, frame);
        let len = frame.len as usize;
        firewall.refusal(View { header: &frame.header, bytes: &head[..have], len, peek: &|_| None })
    }

    /// Returns whether a frame would pass, and by which rule; nothing of the question remains.
    pub(crate) fn would_pass(
        &self,
        direction: Direction,
        burst: &Burst<'_>,
        frame: &Frame,
        now: &Now,
    ) -> (bool, Option<String>) {
        let Some(firewall) = &self.firewall else { return (false, None) };
        let (head, have) = head(burst, frame);
        let view =
            View { header: &frame.header, bytes: &head[..have], len: frame.len as usize, peek: &|_| None };
        let (verdict, rule) = firewall.would_judge(direction, view, now.seconds);
        (verdict == Verdict::Pass, rule)
    }
}

const DENIED: Refusal = Refusal::Drop(DropReason::Firewall);

/// Reads a byte behind the prefix of a frame, in the first piece there.
fn peek(burst: &Burst<'_>, frame: &Frame, at: usize) -> Option<u8> {
    let mut byte = [0];
    let piece = burst.rest(frame).first()?.skip(at.checked_sub(PREFIX)?);
    (piece.copy_to(&mut byte) == 1).then_some(byte[0])
}

/// Copies the bytes that are looked at, at most.
#[cold]
fn head(burst: &Burst<'_>, frame: &Frame) -> ([u8; HEAD], usize) {
    let mut head = [0; HEAD];
    let mut have = frame.prefix().len();
    head[..have].copy_from_slice(frame.prefix());
    for piece in burst.rest(frame) {
        have += piece.copy_to(&mut head[have..]);
    }
    (head, have)
}

/// Random numbers, for the hash of a table of flows.
fn seed() -> [u64; 4] {
    let mut bytes = [0; 32];
    // It fails only before the system has any randomness, and a table whose hash is known is no worse then than another's.
    let _ = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    std::array::from_fn(|word| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[word * 8 + byte])))
}
