//! Models of the packed ring: what must hold, and the mistakes that must be found. See [`model`].

mod model;

use model::{
    NoAcquire, NoFence, NoRelease, Sound, Torn, call, chain_burst, conversation, delayed_call, kick,
};
use model::{used_burst, whole_chain};
use ringferry_ring::RingFeatures;

models!(true);

/// 2.8.10: event suppression is one word to be read as one. Read in two halves, an old position is
/// taken for the one of a new wish, and the driver is called for what it did not wait for. (No call
/// is ever lost by this: the fences see to it that whoever reads an old half is seen by the peer's
/// second look.)
#[test]
#[should_panic(expected = "called before the event")]
fn a_torn_event_word_calls_for_another_position() {
    delayed_call::<Sound, Torn>(EVENT, false);
}
