//! Deficit round robin between ports (Shreedhar and Varghese, 1995), with costs that are known afterwards.
//!
//! Every port has an account in every worker, whatever the number of its queues: 16 pairs are not 16 shares. A port whose account
//! is above zero may be served; what its frames cost ([`cost`](crate::plane::cost)) is subtracted, which may leave it in debt, and a port in debt waits. In every round
//! each port that is in debt is paid a [`QUANTUM`] times its weight. Nobody saves up: an account is never above one payment. When all
//! that are active are in debt, the rounds in which nothing would happen are skipped.
//!
//! So whoever becomes active waits at most for one turn of each other active port, and a turn is bounded by the bound of a burst,
//! [`BURST_COST`](crate::plane::forward::BURST_COST); over time each gets its share of the worker, however expensive its frames are.
//!
//! A port's first turn is a single packet, by which the address behind it is learned. Where nothing is known of any port, as behind a switch that was killed
//! under load, whole bursts for ports that have had no turn yet would go to all, and leave no room for what comes later.

use crate::fdb::PortId;

/// What a port in debt is paid in a round, in the unit of [`cost`](crate::plane::cost): a burst of 32 small frames costs about as much, so a port of such
/// frames is served in every round or in every other.
const QUANTUM: i64 = 5_000;

/// A port's account in one worker.
#[derive(Clone, Copy, Debug)]
struct Account {
    balance: i64,
    /// Payments in each round.
    weight: u16,
    /// The round for which it was last paid.
    round: u32,
    /// Packets that are taken from it at a time.
    burst: u8,
    /// It has had no turn yet.
    fresh: bool,
}

impl Account {
    const NEW: Account = Account { balance: QUANTUM, weight: 1, round: 0, burst: 1, fresh: true };

    fn payment(&self) -> i64 {
        QUANTUM * i64::from(self.weight)
    }

    fn pay(&mut self, times: i64) {
        if self.balance <= 0 {
            self.balance = (self.balance + times * self.payment()).min(self.payment());
        }
    }
}

/// The accounts of all ports in one worker, by number.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    accounts: Vec<Account>,
    round: u32,
}

impl Accounts {
    fn of(&mut self, port: PortId) -> &mut Account {
        let at = usize::from(port.0);
        if self.accounts.len() <= at {
            self.accounts.resize(at + 1, Account::NEW);
        }
        &mut self.accounts[at]
    }

    /// Begins a round.
    pub(super) fn next_round(&mut self) {
        self.round = self.round.wrapping_add(1);
    }

    /// Whether a port may be served in this round.
    #[inline]
    pub(super) fn may_be_served(&mut self, port: PortId) -> bool {
        let round = self.round;
        let account = self.of(port);
        if account.round != round {
            account.round = round;
            account.pay(1);
        }
        account.balance > 0
    }

    /// Skips the rounds in which none of these ports, all of which are in debt, could be served.
    pub(super) fn skip_rounds(&mut self, ports: impl Iterator<Item = PortId> + Clone) {
        let rounds = ports.clone().map(|port| {
            let account = self.of(port);
            -account.balance / account.payment()
        });
        let Some(rounds) = rounds.min().filter(|rounds| *rounds > 0) else { return };
        self.next_round();
        for port in ports {
            let round = self.round;
            let account = self.of(port);
            if account.round != round {
                account.round = round;
                account.pay(rounds);
            }
        }
    }

    /// Charges a port for work.
    #[inline]
    pub(super) fn charge(&mut self, port: PortId, cost: u64) {
        self.of(port).balance -= cost as i64;
    }

    /// Returns what a port in debt is paid in a round.
    pub(super) fn payment(&mut self, port: PortId) -> u64 {
        self.of(port).payment().unsigned_abs()
    }

    /// What a port owes.
    pub(super) fn debt(&mut self, port: PortId) -> u64 {
        u64::try_from(-self.of(port).balance).unwrap_or(0)
    }

    /// Packets to take from a port at a time.
    #[inline]
    pub(super) fn burst(&mut self, port: PortId) -> usize {
        self.of(port).burst.into()
    }

    /// Notes that a burst of `packets` from a port has cost so much: the next one is to cost at most `most`, if it is of the same kind.
    #[inline]
    pub(super) fn note_burst(&mut self, port: PortId, packets: usize, cost: u64, most: u64) {
        let fitting = most * packets as u64 / cost.max(1);
        let account = self.of(port);
        account.burst = fitting.clamp(1, super::BURST as u64) as u8;
        if std::mem::take(&mut account.fresh) {
            account.balance = account.balance.min(0);
        }
    }

    /// Sets how many times a port is paid in each round.
    pub(super) fn set_weight(&mut self, port: PortId, weight: u16) {
        self.of(port).weight = weight.max(1);
    }

    /// Forgets a port, whose number another may get.
    pub(super) fn forget(&mut self, port: PortId) {
        *self.of(port) = Account::NEW;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: PortId = PortId(0);
    const B: PortId = PortId(1);

    /// Serves two ports, each turn of which costs so much, until 10 ms of work are done; what each got of it.
    fn shares(accounts: &mut Accounts, costs: [u64; 2]) -> [u64; 2] {
        let mut got = [0; 2];
        while got[0] + got[1] < 10_000_000 {
            accounts.next_round();
            let mut any = false;
            for (at, port) in [A, B].into_iter().enumerate() {
                while accounts.may_be_served(port) {
                    accounts.charge(port, costs[at]);
                    got[at] += costs[at];
                    any = true;
                }
            }
            if !any {
                accounts.skip_rounds([A, B].into_iter());
            }
        }
        got
    }

    #[test]
    fn shares_follow_weights_whatever_a_turn_costs() {
        for costs in [[4_000, 4_000], [4_000, 100_000], [700, 300_000], [4_000, 500_000]] {
            let [a, b] = shares(&mut Accounts::default(), costs);
            let off = a.abs_diff(b);
            assert!(off <= 2 * costs[1] + 20_000, "{costs:?}: {a} {b}");
        }
        let mut accounts = Accounts::default();
        accounts.set_weight(A, 4);
        let [a, b] = shares(&mut accounts, [4_000, 100_000]);
        assert!(a > 3 * b && a < 5 * b, "{a} {b}");
    }

    #[test]
    fn who_was_idle_has_saved_up_one_payment() {
        let mut accounts = Accounts::default();
        for _ in 0..1000 {
            accounts.next_round();
            assert!(accounts.may_be_served(A));
        }
        accounts.charge(A, QUANTUM as u64);
        assert_eq!((accounts.debt(A), accounts.of(A).balance), (0, 0));
        assert!(!accounts.accounts.is_empty());
    }

    #[test]
    fn rounds_are_skipped_until_the_first_may_be_served() {
        let mut accounts = Accounts::default();
        accounts.charge(A, 1_000_000);
        accounts.charge(B, 100_000);
        accounts.skip_rounds([A, B].into_iter());
        accounts.next_round();
        assert!(accounts.may_be_served(B) && !accounts.may_be_served(A));
        assert_eq!((accounts.debt(A), accounts.debt(B)), (1_000_000 - 21 * 5_000, 0));
    }

    #[test]
    fn fewer_packets_are_taken_where_each_is_dear() {
        let mut accounts = Accounts::default();
        assert_eq!(accounts.burst(A), 1);
        accounts.note_burst(A, 1, 150, 200_000);
        assert!(!accounts.may_be_served(A), "its first turn is over");
        accounts.next_round();
        assert!(accounts.may_be_served(A));
        assert_eq!(accounts.burst(A), 32);
        accounts.note_burst(A, 32, 3_200_000, 200_000);
        assert!(accounts.may_be_served(A));
        assert_eq!(accounts.burst(A), 2);
        accounts.note_burst(A, 2, 2_000_000, 200_000);
        assert_eq!(accounts.burst(A), 1);
        accounts.note_burst(A, 1, 50, 200_000);
        assert_eq!(accounts.burst(A), 32);
    }
}
