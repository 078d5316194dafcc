//! Any bytes as a manifest, with or without the hash that goes with them: `cargo +nightly fuzz run manifest`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zero_checkpoint::fuzzing::{open, sealed};

fuzz_target!(|bytes: &[u8]| {
    let Some((how, bytes)) = bytes.split_first() else { return };
    // What is in its files is as unknown as the manifest.
    let (manifest, content) = bytes.split_at(bytes.len() - bytes.len() / 4);
    if how % 2 == 0 {
        open(manifest, content);
    } else {
        open(&sealed(manifest), content);
    }
});
