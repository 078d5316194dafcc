//! Any bytes as an index of weights or a table of names: `cargo +nightly fuzz run index`.

#![no_main]

use libfuzzer_sys::fuzz_target;
use zero_checkpoint::NameMap;
use zero_checkpoint::fuzzing::read_index;

fuzz_target!(|bytes: &[u8]| {
    for file in read_index(bytes) {
        assert!(!file.contains('/') && !file.starts_with('.'), "`{file}` leads out of its folder");
    }
    let Ok(text) = str::from_utf8(bytes) else { return };
    if let Ok(names) = text.parse::<NameMap>() {
        let (name, _) = names.to_model(text);
        names.to_published(&name);
    }
});
