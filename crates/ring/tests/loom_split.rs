//! Models of the split ring: what must hold, and the mistakes that must be found. See [`model`].

mod model;

use model::{NoAcquire, NoFence, NoRelease, Sound, call, chain_burst, conversation, delayed_call, kick};
use model::{used_burst, whole_chain};
use ringferry_ring::RingFeatures;

models!(false);
