//! libFuzzer's entry to [`sconce_fuzz::environment`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sconce_fuzz::environment::run(data));
