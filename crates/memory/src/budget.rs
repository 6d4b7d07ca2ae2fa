//! A bound on the bytes that may be mapped on behalf of peers.
//!
//! A peer chooses how large the files are that it passes, and a sparse file costs it nothing: a few of them fill the
//! address space, and then nothing else can be mapped, not even memory for the allocator. Who maps for peers makes one
//! [`MapBudget`] for the process and one for each peer [within](MapBudget::within) it. [`Region::map_within`] takes from
//! both before it maps, and gives back when the last user of the region has gone and it has been unmapped, however long
//! that takes: during a change of a memory map the old and the new one count.
//!
//! **Shares.** First come, first served would let some peers take all of the process's budget, and leave none for the next. So each is sure of half of what
//! would be its part if all had the same; what others have not taken of theirs is kept for them, from whoever has more than that.
//!
//! [`Region::map_within`]: crate::Region::map_within

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// More bytes than a [`MapBudget`] has left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{} of guest memory cannot be mapped beside the {} that are: {name} allows {}{}",
    Gib(*wanted), Gib(*taken), Gib(*limit), Kept(*kept)
)]
pub struct OverBudget {
    /// The bytes asked for.
    pub wanted: u64,
    /// The bytes that are mapped already.
    pub taken: u64,
    /// The bytes that may be mapped.
    pub limit: u64,
    /// The bytes of these that are kept for others.
    pub kept: u64,
    /// What sets the limit, for people.
    pub name: &'static str,
}

/// A number of bytes that are kept for others, if there are any, behind a limit.
struct Kept(u64);

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 > 0 { write!(f, ", of which {} are kept for other ports", Gib(self.0)) } else { Ok(()) }
    }
}

/// A number of bytes in the unit that configuration keys have; in bytes, where that says more.
pub struct Gib(pub u64);

impl fmt::Display for Gib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const GIB: u64 = 1 << 30;
        match self.0 {
            bytes if bytes.is_multiple_of(GIB) => write!(f, "{} GiB", bytes / GIB),
            bytes if bytes > GIB / 100 => write!(f, "{:.2} GiB", bytes as f64 / GIB as f64),
            bytes => write!(f, "{bytes} bytes"),
        }
    }
}

/// A number of bytes that may be mapped. It may be used from any thread.
#[derive(Debug)]
pub struct MapBudget {
    limit: u64,
    name: &'static str,
    taken: AtomicU64,
    within: Option<Arc<MapBudget>>,
    /// Those that are within this one. Who takes for one of them has it locked.
    members: Mutex<Vec<Weak<MapBudget>>>,
    /// True once what its members are sure of is [kept](Self::keep_shares) for them.
    shares: AtomicBool,
}

impl MapBudget {
    /// Makes a budget of `limit` bytes. `name` is what sets the limit, such as a configuration key, for error messages.
    pub fn new(limit: u64, name: &'static str) -> Arc<MapBudget> {
        Self::make(limit, name, None)
    }

    /// Makes a budget that nothing exceeds.
    pub fn unlimited() -> Arc<MapBudget> {
        Self::new(u64::MAX, "nothing")
    }

    /// Makes a budget of `limit` bytes, whatever is taken of which is also taken of `outer`.
    pub fn within(outer: &Arc<MapBudget>, limit: u64, name: &'static str) -> Arc<MapBudget> {
        let budget = Self::make(limit, name, Some(Arc::clone(outer)));
        let mut members = outer.lock_members();
        // What is left of those that have gone pins the heap around it: a port that comes and goes took 64 KiB each time, for good.
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(&budget));
        budget
    }

    fn make(limit: u64, name: &'static str, within: Option<Arc<MapBudget>>) -> Arc<MapBudget> {
        let (taken, members, shares) = (AtomicU64::new(0), Mutex::default(), AtomicBool::new(false));
        Arc::new(MapBudget { limit, name, taken, within, members, shares })
    }

    fn lock_members(&self) -> MutexGuard<'_, Vec<Weak<MapBudget>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on what the budgets within this one are sure of is kept for them. Until then who has taken its part at another time, in another process say,
    /// takes it again, in whatever order they come.
    pub fn keep_shares(&self) {
        self.shares.store(true, Ordering::Relaxed);
    }

    /// Returns the bytes that are taken.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Returns the bytes that may be taken in all.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Takes `bytes` until the result is dropped.
    ///
    /// # Errors
    /// [`OverBudget`], of this budget or of the one that it is within; nothing is taken then.
    pub fn take(self: &Arc<Self>, bytes: u64) -> Result<Taken, OverBudget> {
        let mut taken = self.take_of(bytes, 0)?;
        taken.outer =
            self.within.as_ref().map(|outer| outer.take_for(self, bytes)).transpose()?.map(Box::new);
        Ok(taken)
    }

    /// Takes `bytes` that a budget within this one has taken, of what is not kept for others.
    fn take_for(self: &Arc<Self>, member: &Arc<MapBudget>, bytes: u64) -> Result<Taken, OverBudget> {
        let mut members = self.lock_members();
        members.retain(|member| member.strong_count() > 0);
        let sure = self.limit / 2 / members.len().max(1) as u64;
        let others = members.iter().filter(|other| other.as_ptr() != Arc::as_ptr(member));
        let unused = others.filter_map(Weak::upgrade).map(|other| sure.saturating_sub(other.taken()));
        let is_sure = member.taken() <= sure || !self.shares.load(Ordering::Relaxed);
        let kept = if is_sure { 0 } else { unused.sum() };
        self.take_of(bytes, kept)
    }

    /// Takes `bytes` of what is not taken and not `kept`.
    fn take_of(self: &Arc<Self>, bytes: u64, kept: u64) -> Result<Taken, OverBudget> {
        let room = self.limit - kept.min(self.limit);
        let add = |taken: u64| taken.checked_add(bytes).filter(|sum| *sum <= room);
        match self.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Taken { budget: Arc::clone(self), bytes, outer: None }),
            Err(taken) => Err(OverBudget { wanted: bytes, taken, limit: self.limit, kept, name: self.name }),
        }
    }
}

/// Bytes taken of a [`MapBudget`], and of those that it is within; dropping it gives them back.
#[derive(Debug)]
pub struct Taken {
    budget: Arc<MapBudget>,
    bytes: u64,
    /// The same bytes of the budget that it is within, given back with this.
    outer: Option<Box<Taken>>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.budget.taken.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MapError, Region, RegionSpec, SharedMem};

    #[test]
    fn h2_no_more_is_taken_than_either_budget_has() {
        let process = MapBudget::new(100, "process");
        let (a, b) = (MapBudget::within(&process, 70, "port"), MapBudget::within(&process, 70, "port"));
        let first = a.take(60).unwrap();
        let over = OverBudget { wanted: 11, taken: 60, limit: 70, kept: 0, name: "port" };
        assert_eq!(a.take(11).unwrap_err(), over);
        let over = OverBudget { wanted: 41, taken: 60, limit: 100, kept: 0, name: "process" };
        assert_eq!(b.take(41).unwrap_err(), over);
        let second = b.take(40).unwrap();
        assert_eq!((process.taken(), a.taken(), b.taken()), (100, 60, 40));
        assert!(a.take(1).is_err() && a.take(u64::MAX).is_err());
        drop(first);
        assert_eq!((process.taken(), a.taken()), (40, 0));
        drop(second);
        assert_eq!(process.taken(), 0);
    }

    #[test]
    fn l_budgets_that_come_and_go_leave_nothing() {
        let process = MapBudget::new(900, "process");
        let stays = MapBudget::within(&process, 9, "port");
        for _ in 0..100 {
            drop(MapBudget::within(&process, 200, "port"));
            assert!(process.lock_members().len() <= 2);
        }
        drop(stays);
    }

    /// H2: eight front ends with sparse memory took all that the process may map, and the ninth, an honest one, got none.
    #[test]
    fn h2_what_each_is_sure_of_is_kept_from_those_that_take_all() {
        let process = MapBudget::new(900, "process");
        let ports: Vec<_> = (0..9).map(|_| MapBudget::within(&process, 200, "port")).collect();
        assert_eq!(
            ports.iter().filter_map(|port| port.take(200).ok()).collect::<Vec<_>>().len(),
            4,
            "as it was"
        );
        process.keep_shares();
        // An equal part is 100, half of it 50.
        let mut taken: Vec<_> = ports[..8].iter().filter_map(|port| port.take(200).ok()).collect();
        assert_eq!((taken.len(), process.taken()), (3, 600), "of 900, 300 are kept for six");
        let over = OverBudget { wanted: 51, taken: 600, limit: 900, kept: 250, name: "process" };
        assert_eq!(ports[3].take(51).unwrap_err(), over);
        assert!(
            over.to_string()
                .ends_with("process allows 900 bytes, of which 250 bytes are kept for other ports")
        );
        taken.extend(ports[3..].iter().map(|port| port.take(50).unwrap()));
        assert_eq!(process.taken(), 900, "each has got what it was sure of");
        assert!(ports[8].take(1).is_err());
        // One that has gone is sure of nothing.
        drop((taken, ports));
        let alone = MapBudget::within(&process, 900, "port");
        assert!(alone.take(900).is_ok());
        let second = MapBudget::within(&process, 900, "port");
        let over = OverBudget { wanted: 700, taken: 0, limit: 900, kept: 225, name: "process" };
        assert_eq!(alone.take(700).unwrap_err(), over);
        drop(second);
    }

    #[test]
    fn a_refusal_speaks_in_the_unit_of_the_keys() {
        let (wanted, taken, limit) = (3 << 29, 4 << 30, 5 << 30);
        let error = OverBudget { wanted, taken, limit, kept: 0, name: "port_memory_gib" };
        let text = "1.50 GiB of guest memory cannot be mapped beside the 4 GiB that are: port_memory_gib allows 5 GiB";
        assert_eq!(error.to_string(), text);
        assert!(OverBudget { wanted: 4096, ..error }.to_string().starts_with("4096 bytes of"));
    }

    #[test]
    fn h2_sparse_files_take_no_more_address_space_than_allowed() {
        const TERA: u64 = 1 << 40;
        let file = SharedMem::new("sparse", TERA as usize).unwrap();
        let budget = MapBudget::new(2 * TERA, "guest_memory_gib");
        let spec = |guest_addr| RegionSpec { guest_addr, size: TERA, user_addr: 0, mmap_offset: 0 };
        let map = |guest_addr| Region::map_within(file.fd(), spec(guest_addr), &budget);
        let (first, second) = (map(0).unwrap(), map(TERA).unwrap());
        let error = map(2 * TERA).unwrap_err();
        assert!(matches!(error, MapError::Budget(_)) && error.to_string().contains("guest_memory_gib"));
        // It counts until it is unmapped, not only until the map has changed.
        let area = first.area(0, 8).unwrap();
        drop(first);
        assert!(map(0).is_err());
        drop(area);
        drop((map(0).unwrap(), second));
        assert_eq!(budget.taken(), 0);
        // What cannot be mapped takes nothing.
        let beyond = RegionSpec { size: 2 * TERA, ..spec(0) };
        assert!(Region::map_within(file.fd(), beyond, &budget).is_err());
        assert_eq!(budget.taken(), 0);
    }
}
