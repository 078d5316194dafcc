//! Checkpoints that earlier versions have written, of every version of the format: they stay readable.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{Whole, assert_holds, contents, facts, load, ranks, spec, whole};
use half::bf16;
use serde_json::json;
use zero_checkpoint::{
    Checkpoint, Coordinator, LocalStorage, Manifest, Saver, SaverOptions, Storage, verify,
};
use zero_core::{ParameterSpec, Stage};

/// The folder of a version.
fn folder(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/v{version}"))
}

/// What the golden checkpoints of version 1 hold. It must never change.
fn model() -> Vec<Whole> {
    let numbers =
        |start: f32, count: usize| (0..count).map(|index| start + 0.25 * index as f32).collect::<Vec<_>>();
    let filled = |spec: ParameterSpec, start: f32| {
        let mut whole = whole(spec, 0);
        let count = whole.values.len();
        whole.values = numbers(start, count);
        whole.first = whole.first.map(|_| numbers(-start, count));
        whole.second = whole.second.map(|_| numbers(0.5, count).into_iter().map(bf16::from_f32).collect());
        whole
    };
    let tied = ParameterSpec { aliases: vec!["head.weight".to_owned()], ..spec("embedding.weight", &[5, 3]) };
    let frozen = ParameterSpec { trainable: false, ..spec("frozen", &[4]) };
    vec![
        filled(tied, 1.0),
        filled(spec("scale", &[]), -7.5),
        filled(spec("empty", &[0, 2]), 0.0),
        filled(frozen, 3.0),
    ]
}

#[test]
#[ignore = "writes the files of a new version, once"]
fn write() {
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder(Manifest::VERSION)));
    let model = model();
    ranks(2, |group| {
        let (rank, world) = (group.rank(), group.world_size());
        let mut saver = Saver::new(Arc::clone(&storage), Arc::new(group), SaverOptions::default()).unwrap();
        saver.save(&contents(&model, None, facts(7, Stage::Two, 2), rank, world)).unwrap();
    });
}

#[test]
fn every_version_is_read_to_the_bit() {
    for version in 1..=Manifest::VERSION {
        let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder(version)));
        let checkpoint = Checkpoint::open(storage, 7).unwrap();
        let problems = verify(&checkpoint, &mut |_| ()).unwrap();
        assert!(problems.is_empty(), "version {version}: {problems:?}");
        let model = model();
        for world in [1, 3] {
            ranks(world, |group| {
                let (loaded, _) = load(&checkpoint, &model, Stage::Three, &group).unwrap();
                assert_holds(&loaded, &model, Stage::Three, group.rank(), group.world_size());
            });
        }
        let (manifest, expected) = (checkpoint.manifest(), facts(7, Stage::Two, 2));
        assert_eq!((manifest.format_version, manifest.step, manifest.stage), (version, 7, Stage::Two));
        assert_eq!((&manifest.groups, &manifest.training), (&expected.groups, &expected.training));
        assert_eq!(manifest.ranks, [json!({"rank": 0}), json!({"rank": 1})]);
    }
}

/// As a reader in any language would: by the names in the manifest, with a plain safetensors library.
#[test]
fn the_files_are_plain_safetensors() {
    let step = folder(1).join("step-0000000007");
    let manifest: serde_json::Value =
        serde_json::from_slice(&std::fs::read(step.join("manifest.json")).unwrap()).unwrap();
    let mut values = vec![f32::NAN; 15];
    let record = &manifest["parameters"][0];
    assert_eq!(record["name"], "embedding.weight");
    for piece in record["values"]["pieces"].as_array().unwrap() {
        let number = |key: &str| piece[key].as_u64().unwrap() as usize;
        let (start, end) = (number("start"), number("end"));
        let file = manifest["files"][number("file")]["name"].as_str().unwrap();
        let content = std::fs::read(step.join(file)).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&content).unwrap();
        let tensor = tensors.tensor(&format!("model.embedding.weight[{start}:{end}]")).unwrap();
        for (into, bytes) in values[start..end].iter_mut().zip(tensor.data().chunks_exact(4)) {
            *into = f32::from_le_bytes(bytes.try_into().unwrap());
        }
    }
    assert_eq!(values, model()[0].values);
}
