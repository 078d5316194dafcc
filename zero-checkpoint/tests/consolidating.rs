//! Plain weights from checkpoints, and into models.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use common::{Whole, bits, blank, model, save, spec, wanted, whole};
use half::bf16;
use safetensors::SafeTensors;
use tempfile::TempDir;
use zero_checkpoint::{
    Allow, Checkpoint, CheckpointError, ConsolidateOptions, FileLayout, LoadOptions, LocalStorage,
    MemoryStorage, NameMap, PublishedWeights, Storage, TiedWeights, WeightLayout, consolidate, diff,
    transpose,
};
use zero_core::{Bytes, DType, Rank, Stage, WorldSize};

fn saved(model: &[Whole], world: usize) -> Checkpoint {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save(&storage, model, 1, Stage::Three, world);
    Checkpoint::open_latest(storage).unwrap()
}

/// Every tensor of a file: type, shape, bytes.
fn tensors(path: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let content = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&content).unwrap();
    let tensor = |(name, view): (String, safetensors::tensor::TensorView<'_>)| {
        (name, (view.dtype().to_string(), view.shape().to_vec(), view.data().to_vec()))
    };
    file.tensors().into_iter().map(tensor).collect()
}

fn metadata(path: &Path) -> BTreeMap<String, String> {
    let content = fs::read(path).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&content).unwrap();
    metadata.metadata().clone().unwrap_or_default().into_iter().collect()
}

/// A parameter's values as PyTorch lays them out.
fn as_pytorch(whole: &Whole) -> (Vec<usize>, Vec<f32>) {
    match (whole.layout, &whole.spec.shape[..]) {
        (WeightLayout::InOut, &[ins, outs]) => {
            (vec![outs, ins], transpose(&whole.values, ins, outs).unwrap())
        }
        (_, shape) => (shape.to_vec(), whole.values.clone()),
    }
}

fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn one_file_has_all_weights_as_pytorch_has_them() {
    let model = model(1);
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("weights");
    let mut read = 0;
    let written =
        consolidate(&saved(&model, 3), &to, &ConsolidateOptions::default(), &mut |bytes| read += bytes)
            .unwrap();
    assert_eq!(written.files, [to.join("model.safetensors")]);
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing else is left");
    assert_eq!(fs::read_dir(&to).unwrap().count(), 1);
    assert!(read > 0);
    let tensors = tensors(&to.join("model.safetensors"));
    assert_eq!(tensors.len(), model.len());
    for whole in &model {
        let (shape, values) = as_pytorch(whole);
        assert_eq!(
            tensors[&whole.spec.name],
            ("F32".to_owned(), shape, le_bytes(&values)),
            "{}",
            whole.spec.name
        );
    }
    // As `safetensors.torch.save_model` tells what is tied.
    let metadata = metadata(&to.join("model.safetensors"));
    assert_eq!(metadata["format"], "pt");
    assert_eq!(metadata["head.weight"], "embedding.weight");
}

#[test]
fn burns_layout_sixteen_bits_and_copies_of_tied_weights() {
    let model = model(1);
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("weights");
    let options = ConsolidateOptions {
        dtype: Some(DType::BF16),
        layout: FileLayout::Burn,
        tied: TiedWeights::Copied,
        ..ConsolidateOptions::default()
    };
    consolidate(&saved(&model, 2), &to, &options, &mut |_| ()).unwrap();
    let tensors = tensors(&to.join("model.safetensors"));
    for whole in &model {
        let bytes = whole.values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
        let expected = ("BF16".to_owned(), whole.spec.shape.clone(), bytes);
        for name in std::iter::once(&whole.spec.name).chain(&whole.spec.aliases) {
            assert_eq!(tensors[name], expected, "{name}");
        }
    }
    assert_eq!(tensors.len(), model.len() + 1);
}

#[test]
fn many_files_have_an_index_and_come_back_into_a_model() {
    let model = model(2);
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("weights");
    let names: NameMap = r#"{"transformer.h.*.c_fc.weight": "blocks.*.linear.weight", "wte": "embedding.weight"}"#
        .parse()
        .unwrap();
    let options = ConsolidateOptions {
        names: names.clone(),
        max_file: Bytes::new(300),
        ..ConsolidateOptions::default()
    };
    let written = consolidate(&saved(&model, 4), &to, &options, &mut |_| ()).unwrap();
    assert!(written.files.len() > 3, "{written:?}");
    let index: serde_json::Value =
        serde_json::from_slice(&fs::read(to.join("model.safetensors.index.json")).unwrap()).unwrap();
    assert_eq!(index["metadata"]["total_size"], written.bytes);
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), model.len());
    assert!(map.contains_key("transformer.h.0.c_fc.weight") && map.contains_key("wte"), "{map:?}");
    for (name, file) in map {
        assert!(tensors(&to.join(file.as_str().unwrap())).contains_key(name), "{name}");
    }

    // Each rank its own intervals.
    let weights = PublishedWeights::open(&to, names).unwrap();
    for world in [1, 2, 5] {
        let world = WorldSize::new(world).unwrap();
        for rank in world.ranks() {
            let mut loaded = blank(&model);
            let wanted = wanted(&mut loaded, None, Stage::Three, rank, world);
            let report = weights.load(wanted, &LoadOptions::default()).unwrap();
            assert!(report.parameters.iter().all(|parameter| parameter.values));
            for (loaded, whole) in loaded.iter().zip(&model) {
                let range = common::range(whole, &common::held(whole, Stage::Three, rank, world));
                assert_eq!(
                    bits(&loaded.values[range.clone()]),
                    bits(&whole.values[range]),
                    "{}",
                    whole.spec.name
                );
                assert_eq!(loaded.first, blank(std::slice::from_ref(whole))[0].first);
            }
        }
    }
}

#[test]
fn matrices_larger_than_the_buffer_are_transposed_in_parts() {
    let model = [whole(spec("wide", &[700, 3001]), 1), whole(spec("tall", &[3000, 701]), 2)];
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("weights");
    let options = ConsolidateOptions { buffer: Bytes::new(4 << 20), ..ConsolidateOptions::default() };
    consolidate(&saved(&model, 3), &to, &options, &mut |_| ()).unwrap();
    let tensors = tensors(&to.join("model.safetensors"));
    for whole in &model {
        let (shape, values) = as_pytorch(whole);
        assert_eq!(tensors[&whole.spec.name].1, shape);
        assert!(tensors[&whole.spec.name].2 == le_bytes(&values), "{}", whole.spec.name);
    }
    let weights = PublishedWeights::open(&to, NameMap::default()).unwrap();
    let (rank, world) = (Rank::new(1), WorldSize::new(3).unwrap());
    let mut loaded = blank(&model);
    let options = LoadOptions { buffer: Bytes::new(64 << 10), ..LoadOptions::default() };
    weights.load(wanted(&mut loaded, None, Stage::Three, rank, world), &options).unwrap();
    for (loaded, whole) in loaded.iter().zip(&model) {
        let range = common::range(whole, &common::held(whole, Stage::Three, rank, world));
        assert!(bits(&loaded.values[range.clone()]) == bits(&whole.values[range]), "{}", whole.spec.name);
    }
}

#[test]
fn a_save_to_the_same_place_leaves_unfinished_weights_alone() {
    let model = model(1);
    let folder = TempDir::new().unwrap();
    let place: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path()));
    let to = folder.path().join("weights");
    let mut saves = 0;
    let mut save_beside = |_| {
        saves += 1;
        save(&place, &[], saves, Stage::Three, 1);
    };
    consolidate(&saved(&model, 2), &to, &ConsolidateOptions::default(), &mut save_beside).unwrap();
    assert!(saves > 0);
    assert_eq!(tensors(&to.join("model.safetensors")).len(), model.len());
    assert_eq!(fs::read_dir(&to).unwrap().count(), 1);
}

#[test]
fn what_published_weights_lack_is_named() {
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("weights");
    let options = ConsolidateOptions { dtype: Some(DType::BF16), ..ConsolidateOptions::default() };
    let saved_model = model(1);
    consolidate(&saved(&saved_model, 1), &to, &options, &mut |_| ()).unwrap();
    let weights = PublishedWeights::open(&to, NameMap::default()).unwrap();
    let mut other = blank(&saved_model);
    other[6].spec.name = "small".to_owned();
    let ask = |other: &mut [Whole], allow: Allow| {
        let options = LoadOptions { allow, ..LoadOptions::default() };
        weights.load(wanted(other, None, Stage::Three, Rank::ROOT, WorldSize::ONE), &options)
    };
    let error = ask(&mut other, Allow::default()).unwrap_err().to_string();
    for part in [
        "parameter `small` is missing",
        "parameter `tiny` is not in the model",
        "values of parameter `scale`: bf16 in the checkpoint, f32 asked for",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let allow = Allow { missing: true, unexpected: true, dtype: true, ..Allow::default() };
    let report = ask(&mut other, allow).unwrap();
    assert!(!report.parameters[6].values);
    let rounded: Vec<_> = saved_model[0].values.iter().map(|&value| bf16::from_f32(value).to_f32()).collect();
    assert_eq!(bits(&other[0].values), bits(&rounded));
}

#[test]
fn an_index_that_does_not_go_with_its_files_is_refused() {
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("weights");
    let options = ConsolidateOptions { max_file: Bytes::new(300), ..ConsolidateOptions::default() };
    consolidate(&saved(&model(1), 1), &to, &options, &mut |_| ()).unwrap();
    let path = to.join("model.safetensors.index.json");
    let text = fs::read_to_string(&path).unwrap();
    let first = "model-00001-of";
    for (from, to, reason) in [
        (first, "../model-00001-of", "is no name of a file in its folder"),
        (first, "/model-00001-of", "is no name of a file in its folder"),
        ("\"tiny\"", "\"other\"", "tensor `other` is not in"),
        ("{", "[", "invalid type"),
    ] {
        fs::write(&path, text.replacen(from, to, 1)).unwrap();
        let error = PublishedWeights::open(&path, NameMap::default()).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Index { .. }) && error.to_string().contains(reason),
            "{error}"
        );
    }
    let cut: serde_json::Value = serde_json::from_str(&text).unwrap();
    let mut cut = cut;
    cut["weight_map"].as_object_mut().unwrap().remove("tiny");
    fs::write(&path, cut.to_string()).unwrap();
    let error = PublishedWeights::open(&path, NameMap::default()).unwrap_err();
    assert!(error.to_string().contains("tensor `tiny` of"), "{error}");
}

#[test]
fn names_that_become_one_and_places_that_are_taken_are_refused() {
    let folder = TempDir::new().unwrap();
    let to = folder.path().join("weights");
    let names = r#"{"scale": "tiny"}"#.parse().unwrap();
    let options = ConsolidateOptions { names, ..ConsolidateOptions::default() };
    let checkpoint = saved(&model(1), 1);
    let error = consolidate(&checkpoint, &to, &options, &mut |_| ()).unwrap_err();
    assert!(matches!(error, CheckpointError::TwoNames { .. }), "{error}");
    fs::create_dir(&to).unwrap();
    let error = consolidate(&checkpoint, &to, &ConsolidateOptions::default(), &mut |_| ()).unwrap_err();
    assert!(matches!(error, CheckpointError::OutputExists { .. }), "{error}");
    let small = ConsolidateOptions { buffer: Bytes::new(1 << 20), ..ConsolidateOptions::default() };
    let error = consolidate(&checkpoint, &folder.path().join("new"), &small, &mut |_| ()).unwrap_err();
    assert!(matches!(error, CheckpointError::BufferTooSmall { .. }), "{error}");
}

#[test]
fn differences_between_checkpoints_are_named() {
    let mut first = model(1);
    let mut second = model(1);
    (first[0].values[7], second[0].values[7]) = (1.0, 1.5);
    second[1].first.as_mut().unwrap()[0] = f32::NAN;
    second[2].updates = 8;
    second[4].spec.name = "factor".to_owned();
    second[5].spec.trainable = false;
    (second[6].first, second[6].second) = (None, None);
    let changes = diff(&saved(&first, 2), &saved(&second, 3), &mut |_| ()).unwrap();
    let changes: Vec<_> = changes.iter().map(ToString::to_string).collect();
    for expected in [
        "embedding.weight: 1 of 114 elements differ, by 5e-1 at most",
        "first_moment of blocks.0.linear.weight: 1 of 72 elements differ",
        "blocks.0.linear.bias: updates 7 | 8",
        "empty: trainable true | false",
        "first_moment of tiny: only in checkpoint 1",
        "scale: only in checkpoint 1",
        "factor: only in checkpoint 2",
    ] {
        assert!(changes.iter().any(|change| change == expected), "{expected} is not among {changes:#?}");
    }
    assert!(diff(&saved(&first, 2), &saved(&first, 2), &mut |_| ()).unwrap().is_empty());
}
