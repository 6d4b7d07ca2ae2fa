//! The impairments of one direction as a function of the seed, the frames and their times.
//!
//! Each kind of impairment has a stream of chance of its own, and takes from it for each frame that it is asked about. So a seed gives the same frames lost
//! whatever the other impairments are, and a change of one leaves the others as they would have been.
//!
//! The vocabulary is that of tc-netem(8); the models are the published ones: independent losses, the chain of Gilbert (1960) and Elliott (1963), and
//! delays that deviate by a distribution.

use serde::{Deserialize, Serialize};

use super::random::{Random, split_mix};
use crate::impairments::{Impairments, Loss};

/// The streams of chance, by what they decide.
#[derive(Clone, Copy)]
enum Stream {
    Loss,
    Duplicate,
    Reorder,
    Jitter,
    Corrupt,
}

/// Number of streams.
const STREAMS: usize = 5;

/// One way of a frame through the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Passage {
    /// When it arrives at the other end, in nanoseconds of the switch's clock.
    pub(crate) due: u64,
    /// It has not met the delay that others have.
    pub(crate) reordered: bool,
    /// A random number that says which of its bits is inverted, if one is.
    pub(crate) flip: Option<u64>,
}

/// Where chance stands on one direction of a wire in one worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Model {
    streams: [Random; STREAMS],
    /// The chain of Gilbert and Elliott is in its bad state.
    bad: bool,
    /// Frames that were delayed since one was sent at once.
    delayed: u32,
}

/// A [`Model`] on its way to another process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct ModelState {
    streams: Vec<[u64; 4]>,
    bad: bool,
    delayed: u32,
}

impl Model {
    /// Begins the chance of a seed, for one of the directions.
    pub(crate) fn new(seed: u64, direction: u8) -> Model {
        // What the streams are seeded with comes from one more generator, which is far from where it began when the next direction's begins.
        let mut state = seed;
        for _ in 0..direction {
            state = split_mix(&mut state);
        }
        Model { streams: std::array::from_fn(|_| Random::new(split_mix(&mut state))), bad: false, delayed: 0 }
    }

    fn stream(&mut self, stream: Stream) -> &mut Random {
        &mut self.streams[stream as usize]
    }

    /// Decides whether the next frame is lost.
    pub(crate) fn loses(&mut self, impairments: &Impairments) -> bool {
        match impairments.loss {
            Loss::None => false,
            Loss::Random(share) => self.stream(Stream::Loss).happens(share),
            Loss::GilbertElliott { to_bad, to_good, in_bad, in_good } => {
                let change = if self.bad { to_good } else { to_bad };
                self.bad ^= self.stream(Stream::Loss).happens(change);
                let share = if self.bad { in_bad } else { in_good };
                self.stream(Stream::Loss).happens(share)
            }
        }
    }

    /// Decides whether a frame is sent twice.
    pub(crate) fn doubles(&mut self, impairments: &Impairments) -> bool {
        self.stream(Stream::Duplicate).happens(impairments.duplicate)
    }

    /// Decides when a frame arrives whose last bit is on the line at `sent`, and whether it arrives as it was.
    pub(crate) fn passage(&mut self, impairments: &Impairments, sent: u64) -> Passage {
        let flip = self.stream(Stream::Corrupt).happens(impairments.corrupt);
        let flip = flip.then(|| self.stream(Stream::Corrupt).next());
        let reordered =
            self.delayed + 1 >= impairments.gap && self.stream(Stream::Reorder).happens(impairments.reorder);
        if reordered {
            self.delayed = 0;
            return Passage { due: sent, reordered, flip };
        }
        self.delayed = self.delayed.saturating_add(1);
        Passage { due: sent.saturating_add(self.delay(impairments)), reordered, flip }
    }

    /// Returns the delay of the next frame.
    fn delay(&mut self, impairments: &Impairments) -> u64 {
        let Impairments { delay, jitter, distribution, .. } = *impairments;
        if jitter == 0 {
            return delay;
        }
        let deviation = self.stream(Stream::Jitter).deviation(distribution) * jitter as f64;
        // Nothing arrives before it was sent.
        delay.saturating_add_signed(deviation as i64)
    }

    /// Returns where it stands.
    pub(crate) fn state(&self) -> ModelState {
        let Model { streams, bad, delayed } = self;
        ModelState { streams: streams.iter().map(Random::state).collect(), bad: *bad, delayed: *delayed }
    }

    /// Goes on from there. Streams that the state does not have stay as they are.
    pub(crate) fn set_state(&mut self, state: &ModelState) {
        for (stream, state) in self.streams.iter_mut().zip(&state.streams) {
            *stream = Random::of_state(*state);
        }
        (self.bad, self.delayed) = (state.bad, state.delayed);
    }
}
