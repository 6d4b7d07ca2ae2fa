//! See [`ringferry_fuzz::firewall::firewall`].
#![forbid(unsafe_code)]
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    ringferry_fuzz::firewall::firewall(input);
});
