//! Models of the packed ring: what must hold, and the mistakes that must be found. See [`model`].

mod model;

use model::{
    NoAcquire, NoFence, NoRelease, Sound, Torn, call, chain_burst, conversation, delayed_call, kick,
};
use model::{used_burst, whole_chain};
use ringferry_ring::RingFeatures;

models!(true);

/// 2.8.10: event suppression is one word that must be loaded as a whole. If it is loaded in two halves, an old `off_wrap`
/// is combined with new `flags`, and the driver is called for a slot that it did not wait for. (No call is ever lost by
/// this: by the fences, the stores of a side that loads an old half are seen when the peer checks its ring once more.)
#[test]
#[should_panic(expected = "called before the event")]
fn a_torn_event_word_calls_for_another_position() {
    delayed_call::<Sound, Torn>(EVENT, false);
}
