//! The variants that are measured against each other, and their names.

use crate::labels::Labels;

/// Buffers per publish that are measured.
pub const BATCHES: [usize; 4] = [1, 8, 32, 256];

/// One ring, one way to use it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// Threads sleep when there is nothing to do, and wake each other by eventfd, with EVENT_IDX;
    /// otherwise both poll.
    pub notified: bool,
    /// Buffers added per publish, and taken at most per turn.
    pub batch: usize,
    pub kind: Kind,
}

/// The kind of ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two indexes and nothing behind them.
    Null,
    Ring {
        /// True for a packed ring, false for a split one.
        packed: bool,
        /// True with VIRTIO_F_IN_ORDER.
        in_order: bool,
        /// A table of two buffers per chain, or one descriptor.
        indirect: bool,
        /// Private copies of the words a side owns.
        shadow: bool,
    },
}

impl Variant {
    /// All variants, in the order they are listed.
    pub fn all() -> Vec<Self> {
        let flags = [false, true];
        let mut all = Vec::new();
        for notified in flags {
            let mut push = |kind, batch| all.push(Self { notified, batch, kind });
            for batch in BATCHES {
                push(Kind::Null, batch);
            }
            for (packed, in_order, indirect) in flags
                .into_iter()
                .flat_map(|packed| flags.map(|in_order| (packed, in_order)))
                .flat_map(|(packed, in_order)| flags.map(|indirect| (packed, in_order, indirect)))
            {
                for batch in BATCHES {
                    for shadow in [false, true] {
                        push(Kind::Ring { packed, in_order, indirect, shadow }, batch);
                    }
                }
            }
        }
        all
    }

    /// The same without shadows: what it is compared with. None for what has no shadows.
    pub fn baseline(&self) -> Option<Self> {
        match self.kind {
            Kind::Ring { packed, in_order, indirect, shadow: true } => {
                Some(Self { kind: Kind::Ring { packed, in_order, indirect, shadow: false }, ..*self })
            }
            _ => None,
        }
    }

    pub fn labels(&self) -> Labels {
        let labels = Labels::new().with("mode", if self.notified { "notified" } else { "polling" });
        match self.kind {
            Kind::Null => labels.with("ring", "null").with("batch", self.batch),
            Kind::Ring { packed, in_order, indirect, shadow } => labels
                .with("ring", if packed { "packed" } else { "split" })
                .with("order", if in_order { "in" } else { "any" })
                .with("chain", if indirect { "indirect" } else { "direct" })
                .with("batch", self.batch)
                .with("shadow", if shadow { "on" } else { "off" }),
        }
    }

    /// The group that it is drawn in: all batches, with shadows and without.
    pub fn group(&self) -> String {
        let mode = if self.notified { "notified" } else { "polling" };
        match self.kind {
            Kind::Null => format!("null ring, {mode}"),
            Kind::Ring { packed, in_order, indirect, .. } => format!(
                "{}{}, {}, {mode}",
                if packed { "packed" } else { "split" },
                if in_order { " in order" } else { "" },
                if indirect { "indirect" } else { "direct" }
            ),
        }
    }

    /// The variant of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::all().into_iter().find(|variant| variant.labels().to_string() == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_has_its_own_name_and_is_found_by_it() {
        let all = Variant::all();
        // Two modes; the null ring and four rings with direct and indirect chains and two shadowings.
        assert_eq!(all.len(), 2 * 4 * (1 + 4 * 2 * 2));
        for variant in &all {
            assert_eq!(Variant::named(&variant.labels().to_string()), Some(*variant));
        }
        assert_eq!(Variant::named("ring=round"), None);
    }

    #[test]
    fn a_shadowed_ring_is_compared_with_itself_without() {
        for variant in Variant::all() {
            let Some(baseline) = variant.baseline() else { continue };
            assert_eq!(variant.labels().with("shadow", "off"), baseline.labels());
            assert_eq!((variant.group(), baseline.baseline()), (baseline.group(), None));
        }
    }
}
