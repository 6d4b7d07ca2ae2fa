//! [`Multicast`]: the multicast filter of one interface. It is created when the interface connects;
//! extras on the transmit rings change it and the delivery of frames asks it, on the threads of the
//! interface's port; it ends with the interface.

/// Most addresses kept, as in Linux (`XEN_NETBK_MCAST_MAX`): more are refused, and a front end
/// whose address is refused asks for all.
pub const MAX_ADDRESSES: usize = 64;

/// The addresses that a front end registered by extras on its transmit rings.
#[derive(Clone, Debug, Default)]
pub struct Multicast {
    filter: bool,
    table: Vec<[u8; 6]>,
}

impl Multicast {
    /// Creates a filter that accepts every frame unless the front end asked for filtering
    /// (`request-multicast-control`).
    pub fn new(filter: bool) -> Self {
        Self { filter, table: Vec::new() }
    }

    /// Switches filtering on or off. A front end may change it at any time
    /// (`feature-dynamic-multicast-control`); registered addresses are kept.
    pub fn set_filter(&mut self, filter: bool) {
        self.filter = filter;
    }

    /// Registers an address; returns false when there are too many.
    pub fn add(&mut self, mac: [u8; 6]) -> bool {
        if self.table.contains(&mac) {
            return true;
        }
        let room = self.table.len() < MAX_ADDRESSES;
        if room {
            self.table.push(mac);
        }
        room
    }

    /// Removes an address from the filter.
    pub fn remove(&mut self, mac: [u8; 6]) {
        self.table.retain(|known| *known != mac);
    }

    /// Returns true if a frame to `destination` is wanted: only multicast frames are filtered, and
    /// broadcast is not among them.
    #[inline]
    pub fn accepts(&self, destination: &[u8; 6]) -> bool {
        !self.filter
            || destination[0] & 1 == 0
            || *destination == [0xff; 6]
            || self.table.contains(destination)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GROUP: [u8; 6] = [1, 0, 0x5e, 0, 0, 1];

    #[test]
    fn only_multicast_is_filtered_and_only_on_request() {
        let mut multicast = Multicast::default();
        assert!(multicast.accepts(&GROUP));
        multicast.set_filter(true);
        assert!(!multicast.accepts(&GROUP));
        assert!(multicast.accepts(&[0xff; 6]) && multicast.accepts(&[2; 6]));
        assert!(multicast.add(GROUP) && multicast.accepts(&GROUP));
        multicast.remove(GROUP);
        assert!(!multicast.accepts(&GROUP));
    }

    #[test]
    fn no_more_addresses_than_linux_keeps() {
        let mut multicast = Multicast::new(true);
        let group = |i: usize| [1, 0, 0x5e, 0, 0, i as u8];
        assert!((0..MAX_ADDRESSES).all(|i| multicast.add(group(i))));
        assert!(!multicast.add(group(MAX_ADDRESSES)));
        assert!(multicast.add(group(0)), "known already");
        multicast.remove(group(0));
        assert!(multicast.add(group(MAX_ADDRESSES)));
    }
}
