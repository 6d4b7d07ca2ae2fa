//! See [`ringferry_fuzz::reload::reload`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::reload::reload(input);
});
