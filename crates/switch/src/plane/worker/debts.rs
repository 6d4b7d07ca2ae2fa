//! Receivers whose buffers cost more of the worker than their share.
//!
//! A frame is paid for by its sender, who does not choose what it is written to: a guest that posts chains of dozens of small buffers, on as many pages,
//! makes the delivery of each frame ten times as dear, and with a port of its own that sends to it, it would have most of the worker for the price of
//! a flood of small frames. So the buffers beyond what usual drivers have frames take are the receiver's [debt](Debts::charge): no driver in order has any.
//! It is paid like that of a [sender](super::fair), in every round, and while it is above [`MOST`] the port takes nothing more (`dear-buffers`).
//! A debt is forgiven when nobody else had work, which is known at the end of a round: until then the port takes what costs up to [`MOST_AT_ONCE`], and
//! the burst that exceeds it.

use crate::fdb::PortId;
use crate::plane::cost;
use crate::plane::port::Port;
use crate::plane::queues::{MOST_UNUSUAL, Queues};
use crate::plane::worker::fair::Accounts;

/// The debt above which a port takes nothing more, in the unit of [`cost`]: some 400 buffers.
const MOST: u64 = 50_000;

/// What a port's buffers may cost in a round before it takes nothing more until the end of the round: what those of one burst cost at most. Many that
/// send to one port would else have it take as many bursts.
const MOST_AT_ONCE: u64 = cost::of_unusual_buffers(MOST_UNUSUAL);

/// So many others that one of them owes nothing, as far as anybody cares.
const MANY: usize = 16;

/// A port that owes.
#[derive(Clone, Copy, Debug)]
struct Debt {
    port: PortId,
    owed: u64,
    /// What was added to it in this round.
    added: u64,
}

/// The debts of one worker's receivers.
#[derive(Debug, Default)]
pub(super) struct Debts {
    debts: Vec<Debt>,
    /// Ports that have had work in this round which has cost no receiver anything, no more than [`MANY`].
    others: Vec<PortId>,
}

impl Debts {
    /// Takes note of what a port's buffers have cost. Returns true if it is to take nothing more in this round.
    #[cold]
    pub(super) fn charge(&mut self, port: PortId, cost: u64) -> bool {
        let at = self.debts.iter().position(|debt| debt.port == port).unwrap_or_else(|| {
            self.debts.push(Debt { port, owed: 0, added: 0 });
            self.debts.len() - 1
        });
        let debt = &mut self.debts[at];
        debt.owed += cost;
        debt.added += cost;
        debt.added >= MOST_AT_ONCE
    }

    /// Takes note that a port had work that has cost no receiver anything.
    #[inline]
    pub(super) fn note_other(&mut self, port: PortId) {
        if self.others.last() != Some(&port) && self.others.len() < MANY {
            self.others.push(port);
        }
    }

    /// Pays what ports owe at the end of a round: all of it, if nobody else had work in it.
    #[inline]
    pub(super) fn pay<P: Queues>(&mut self, ports: &mut [Option<Port<P>>], accounts: &mut Accounts) {
        if !self.debts.is_empty() {
            self.pay_all(ports, accounts);
        }
        self.others.clear();
    }

    #[cold]
    fn pay_all<P: Queues>(&mut self, ports: &mut [Option<Port<P>>], accounts: &mut Accounts) {
        let owes = |port: &PortId| self.debts.iter().any(|debt| debt.port == *port);
        let others = self.others.len() == MANY || !self.others.iter().all(owes);
        self.debts.retain_mut(|Debt { port: id, owed, added }| {
            *added = 0;
            let Some(Some(port)) = ports.get_mut(usize::from(id.0)) else { return false };
            *owed = if others { owed.saturating_sub(accounts.payment(*id)) } else { 0 };
            port.owes = *owed > MOST;
            *owed > 0
        });
    }

    /// Forgets a port, whose number another may get.
    pub(super) fn forget(&mut self, port: PortId) {
        self.debts.retain(|debt| debt.port != port);
    }
}
