//! libFuzzer's entry to [`sconce_fuzz::deepspeed_json`].

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| sconce_fuzz::deepspeed_json::run(data));
