//! What is read from places that others write to, for whoever fuzzes it. Not part of the API.

use std::sync::Arc;

use zero_core::{DType, ParameterSpec};

use crate::bytes::Target;
use crate::coordinator::Solo;
use crate::digest::Digest;
use crate::load::{Checkpoint, LoadOptions, Wanted, WantedParameter};
use crate::manifest::Manifest;
use crate::storage::{MemoryStorage, Storage};
use crate::tools::{Summary, verify};

/// The most elements of a parameter that [`open`] makes room for.
const MOST: usize = 1 << 20;

/// `body` with the hash that goes with it, as a manifest ends.
pub fn sealed(body: &[u8]) -> Vec<u8> {
    let hash = Digest::of(body);
    [body, format!(",\"hash\":\"{hash}\"}}\n").as_bytes()].concat()
}

/// Opens a checkpoint with this manifest, whose files all have this content, and does with it all that can be done; whether
/// it was one.
pub fn open(manifest: &[u8], content: &[u8]) -> bool {
    let storage = Arc::new(MemoryStorage::new());
    let put = |name: &str, bytes: &[u8]| {
        let write = || {
            let mut file = storage.create(&format!("folder/{name}"), bytes.len() as u64)?;
            file.write(bytes)?;
            file.finish()
        };
        write().is_ok()
    };
    if storage.create_folder("folder").is_err() || !put("manifest.json", manifest) {
        return false;
    }
    if let Ok(manifest) = Manifest::from_bytes(manifest, "manifest") {
        for file in &manifest.files {
            put(&file.name, content);
        }
    }
    let Ok(checkpoint) = Checkpoint::open_folder(storage, "folder") else { return false };
    let _ = Summary::of(&checkpoint).to_string();
    // A chunk of it is read at once.
    if checkpoint.manifest().chunk_bytes <= MOST as u64 {
        let _ = verify(&checkpoint, &mut |_| ());
        load(&checkpoint);
    }
    true
}

fn load(checkpoint: &Checkpoint) {
    let records = &checkpoint.manifest().parameters;
    let mut values: Vec<Vec<u8>> =
        records.iter().map(|record| vec![0; record.numel().min(MOST) * record.values.dtype.size()]).collect();
    let wanted = records.iter().zip(&mut values).map(|(record, values)| WantedParameter {
        spec: ParameterSpec {
            name: record.name.clone(),
            shape: record.shape.clone(),
            dtype: DType::F32,
            trainable: record.trainable,
            aliases: record.aliases.clone(),
        },
        layout: record.layout,
        range: 0..record.numel().min(MOST),
        values: Target::bytes(record.values.dtype, values),
        states: Vec::new(),
    });
    let options = LoadOptions { optimizer: false, ..LoadOptions::default() };
    let _ = checkpoint.load(Wanted { parameters: wanted.collect() }, &options, &Solo);
}

/// Reads an index of weights; the files that it names.
pub fn read_index(bytes: &[u8]) -> Vec<String> {
    crate::import::read_index(bytes).map(|index| index.into_values().collect()).unwrap_or_default()
}
