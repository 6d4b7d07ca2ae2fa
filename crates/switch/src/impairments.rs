//! Wires and their impairments: what a `[[wire]]` table says, in the words of tc-netem(8).
//!
//! A wire joins two ports, its ends, and nobody else: each gets what the other one sends, byte for byte. The
//! configuration has one [`Wire`] for each; a port that is an end of one has a [`WireEnd`] among its
//! [`Rules`](crate::rules::Rules), with the [`Impairments`] of the direction *towards* it, since frames wait at the
//! port that they are for. [`plane::wire`](crate::plane) carries them out.

/// Shares are whole numbers of this part: a billionth, so that `0.0000001%` can be said.
const WHOLE: u32 = 1_000_000_000;

/// A probability, in billionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Share(u32);

impl Share {
    /// It never happens.
    pub const NONE: Share = Share(0);
    /// It always happens.
    pub const ALL: Share = Share(WHOLE);

    /// Makes a share of billionths; `None` if they are more than the whole.
    pub const fn of_billionths(billionths: u32) -> Option<Share> {
        if billionths <= WHOLE { Some(Share(billionths)) } else { None }
    }

    /// Returns the share in billionths.
    pub const fn billionths(self) -> u32 {
        self.0
    }

    /// Returns what is left of the whole.
    #[must_use]
    pub const fn rest(self) -> Share {
        Share(WHOLE - self.0)
    }

    /// Returns true if it never happens.
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

/// Which frames are lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Loss {
    /// None.
    #[default]
    None,
    /// Each with this probability, whatever became of the others.
    Random(Share),
    /// Bursts, by the model of Gilbert and Elliott: a chain of two states, each with a probability of loss of its own.
    GilbertElliott {
        /// `p`: the probability of a change from the good state to the bad one, at each frame.
        to_bad: Share,
        /// `r`: the probability of a change back.
        to_good: Share,
        /// `1-h`: the probability of loss in the bad state.
        in_bad: Share,
        /// `1-k`: the probability of loss in the good state.
        in_good: Share,
    },
}

/// How the delays of single frames are spread around the mean one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Distribution {
    /// Evenly, between the delay less the jitter and the delay with it.
    #[default]
    Uniform,
    /// By the normal distribution, of which the jitter is the standard deviation.
    Normal,
    /// By a Pareto distribution of shape 3 with that standard deviation: most frames are a little early, few very late.
    Pareto,
    /// One part of the normal and three of the Pareto distribution, with that standard deviation.
    ParetoNormal,
}

/// The impairments of one direction of a wire. The default has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Impairments {
    /// Time that each frame is on the wire, in nanoseconds.
    pub delay: u64,
    /// Variation of it, in nanoseconds.
    pub jitter: u64,
    /// How it varies.
    pub distribution: Distribution,
    /// Which frames are lost.
    pub loss: Loss,
    /// Probability that a frame is sent twice.
    pub duplicate: Share,
    /// Probability that a frame is not delayed, and so overtakes those before it.
    pub reorder: Share,
    /// At most each such frame is sent at once, counted from the last one that was; at least 1.
    pub gap: u32,
    /// Probability that one bit of a frame is inverted.
    pub corrupt: Share,
    /// Bits of frames that the wire carries per second; `None`: as many as come.
    pub rate: Option<u64>,
    /// Frames that wait for the rate at most.
    pub limit: u32,
    /// Bytes of memory that all waiting frames take at most, those that are delayed among them.
    pub limit_bytes: u64,
}

/// Frames that wait for a wire's rate where nothing is said: as many as tc-netem(8) has waiting.
pub const DEFAULT_LIMIT: u32 = 1000;

/// Memory of the frames of one direction where nothing is said: 500 ms at 1 Gbit/s.
pub const DEFAULT_LIMIT_BYTES: u64 = 64 << 20;

impl Default for Impairments {
    fn default() -> Self {
        Self {
            delay: 0,
            jitter: 0,
            distribution: Distribution::default(),
            loss: Loss::None,
            duplicate: Share::NONE,
            reorder: Share::NONE,
            gap: 1,
            corrupt: Share::NONE,
            rate: None,
            limit: DEFAULT_LIMIT,
            limit_bytes: DEFAULT_LIMIT_BYTES,
        }
    }
}

impl Impairments {
    /// Returns true if every frame leaves as it came, and at once.
    pub fn is_none(&self) -> bool {
        let Self { delay, jitter, loss, duplicate, corrupt, rate, .. } = self;
        (*delay, *jitter) == (0, 0)
            && *loss == Loss::None
            && duplicate.is_none()
            && corrupt.is_none()
            && rate.is_none()
    }
}

/// A wire: a `[[wire]]` table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wire {
    /// Its name.
    pub name: String,
    /// The names of its ends: the first is called A, the second B.
    pub ports: [String; 2],
    /// The number from which all chance on the wire follows; `None`: one that is drawn when the wire is made.
    pub seed: Option<u64>,
    /// The impairments from A to B, and from B to A.
    pub directions: [Impairments; 2],
}

impl Wire {
    /// Returns the port at the other end of the one of this name, with the direction from there, as an index of [`directions`](Self::directions).
    pub fn opposite(&self, port: &str) -> Option<(&str, usize)> {
        match &self.ports {
            [a, b] if a == port => Some((b, 1)),
            [a, b] if b == port => Some((a, 0)),
            _ => None,
        }
    }

    /// Returns what the port of this name is as an end of the wire, of which `drawn` is the seed if it has none of its own; `None` if it is no end of it.
    pub fn end(&self, port: &str, drawn: u64) -> Option<WireEnd> {
        let (peer, direction) = self.opposite(port)?;
        Some(WireEnd {
            wire: self.name.clone(),
            peer: peer.to_owned(),
            seed: self.seed.unwrap_or(drawn),
            direction: direction as u8,
            impairments: self.directions[direction].clone(),
        })
    }
}

/// What a port is as an end of a wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WireEnd {
    /// The name of the wire.
    pub wire: String,
    /// The name of the port at the other end.
    pub peer: String,
    /// The wire's seed.
    pub seed: u64,
    /// The number of the direction towards this port, 0 or 1, so that chance differs between the two.
    pub direction: u8,
    /// The impairments of that direction.
    pub impairments: Impairments,
}
