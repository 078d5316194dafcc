//! Checkpoints and models that do not go together.

mod common;

use std::sync::Arc;

use common::{Whole, blank, model, save, spec, wanted, whole};
use half::bf16;
use zero_checkpoint::{
    Allow, Checkpoint, CheckpointError, LoadOptions, LoadReport, MemoryStorage, Solo, Storage, Target,
    Wanted, WantedParameter, WeightLayout,
};
use zero_core::{Bytes, DType, Rank, Stage, WorldSize};

fn saved(model: &[Whole]) -> Checkpoint {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save(&storage, model, 1, Stage::Three, 2);
    Checkpoint::open_latest(storage).unwrap()
}

fn load(
    checkpoint: &Checkpoint,
    into: &mut [Whole],
    options: &LoadOptions,
) -> Result<LoadReport, CheckpointError> {
    let wanted = wanted(into, None, Stage::Three, Rank::ROOT, WorldSize::ONE);
    checkpoint.load(wanted, options, &Solo)
}

fn differences(checkpoint: &Checkpoint, into: &mut [Whole], options: &LoadOptions) -> Vec<String> {
    match load(checkpoint, into, options) {
        Err(CheckpointError::Differences { differences, .. }) => {
            differences.iter().map(ToString::to_string).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn allow(allow: Allow) -> LoadOptions {
    LoadOptions { allow, ..LoadOptions::default() }
}

#[test]
fn missing_and_unexpected_parameters_are_named_and_can_be_allowed() {
    let checkpoint = saved(&model(1));
    let mut other = blank(&model(1));
    other[2].spec.name = "blocks.0.linear.offset".to_owned();
    let strict = LoadOptions::default();
    let missing = "parameter `blocks.0.linear.offset` is missing in the checkpoint";
    let unexpected = "parameter `blocks.0.linear.bias` is not in the model";
    assert_eq!(differences(&checkpoint, &mut other, &strict), [missing, unexpected]);
    let some = allow(Allow { missing: true, ..Allow::default() });
    assert_eq!(differences(&checkpoint, &mut other, &some), [unexpected]);

    other[2].values.fill(9.0);
    let both = allow(Allow { missing: true, unexpected: true, ..Allow::default() });
    let report = load(&checkpoint, &mut other, &both).unwrap();
    assert!(!report.parameters[2].values && report.parameters[2].updates == 0);
    assert!(other[2].values.iter().all(|&value| value == 9.0), "it starts fresh");
    assert_eq!(other[1].values, model(1)[1].values);
}

#[test]
fn missing_and_unexpected_states_are_named_and_can_be_allowed() {
    let checkpoint = saved(&model(1));
    let mut other = blank(&model(1));
    // Unfrozen since.
    other[3].first = Some(vec![0.0; 35]);
    other[0].second = None;
    let found = differences(&checkpoint, &mut other, &LoadOptions::default());
    assert_eq!(
        found,
        [
            "state `second_moment` of parameter `embedding.weight` is not in the model's optimizer",
            "state `first_moment` of parameter `frozen.weight` is missing in the checkpoint",
        ]
    );
    let both = allow(Allow { missing: true, unexpected: true, ..Allow::default() });
    let report = load(&checkpoint, &mut other, &both).unwrap();
    assert_eq!((report.parameters[3].values, &report.parameters[3].states[..]), (true, &[false][..]));
    assert_eq!((report.parameters[0].updates, &report.parameters[0].states[..]), (7, &[true][..]));
}

#[test]
fn optimizer_state_can_be_left_where_it_is() {
    let saved_model = model(1);
    let checkpoint = saved(&saved_model);
    let mut other = blank(&saved_model);
    let options = LoadOptions { optimizer: false, ..LoadOptions::default() };
    let report = load(&checkpoint, &mut other, &options).unwrap();
    assert!(report.parameters.iter().all(|parameter| parameter.values && parameter.updates == 0));
    assert_eq!(other[0].values, saved_model[0].values);
    assert_eq!(other[0].first, blank(&saved_model)[0].first);
}

#[test]
fn a_wrong_shape_is_named_and_starts_fresh_when_allowed() {
    let checkpoint = saved(&model(1));
    let mut other = blank(&model(1));
    other[1] = whole(spec("blocks.0.linear.weight", &[12, 6]), 5);
    let found = differences(&checkpoint, &mut other, &LoadOptions::default());
    let shape =
        "parameter `blocks.0.linear.weight` has shape [6, 12] in the checkpoint, [12, 6] in the model";
    assert_eq!(found, [shape]);
    let before = other[1].clone();
    let report = load(&checkpoint, &mut other, &allow(Allow { shape: true, ..Allow::default() })).unwrap();
    assert!(!report.parameters[1].values);
    assert_eq!(other[1], before);
}

#[test]
fn a_wrong_dtype_is_named_and_converted_when_allowed() {
    let original = vec![whole(spec("w", &[300, 100]), 1)];
    let checkpoint = saved(&original);
    let mut values = vec![bf16::ZERO; 10_000];
    let mut ask = |options: &LoadOptions| {
        let values = Target::bytes(DType::BF16, bytemuck::cast_slice_mut(&mut values));
        let (spec, range) = (original[0].spec.clone(), 5_000..15_000);
        let parameters =
            vec![WantedParameter { spec, layout: WeightLayout::InOut, range, values, states: vec![] }];
        checkpoint.load(Wanted { parameters }, options, &Solo)
    };
    let strict = LoadOptions { optimizer: false, ..LoadOptions::default() };
    let error = ask(&strict).unwrap_err().to_string();
    assert!(error.contains("values of parameter `w`: f32 in the checkpoint, bf16 asked for"), "{error}");
    ask(&LoadOptions { allow: Allow { dtype: true, ..Allow::default() }, ..strict }).unwrap();
    let expected: Vec<_> =
        original[0].values[5_000..15_000].iter().map(|&value| bf16::from_f32(value)).collect();
    assert_eq!(values, expected);
}

#[test]
fn integers_are_not_converted_even_if_other_types_are() {
    let checkpoint = saved(&[whole(spec("w", &[4]), 1)]);
    let mut values = [0u8; 16];
    let target = Target::bytes(DType::I32, &mut values);
    let wanted = WantedParameter {
        spec: spec("w", &[4]),
        layout: WeightLayout::Plain,
        range: 0..4,
        values: target,
        states: vec![],
    };
    let allow = Allow { dtype: true, unexpected: true, ..Allow::default() };
    let options = LoadOptions { allow, ..LoadOptions::default() };
    let error = checkpoint.load(Wanted { parameters: vec![wanted] }, &options, &Solo).unwrap_err();
    assert!(error.to_string().contains("i32 asked for"), "{error}");
}

#[test]
fn ties_are_kept_and_other_ties_are_named() {
    let checkpoint = saved(&model(1));
    // Named by its alias: the same parameter.
    let mut renamed = blank(&model(1));
    renamed[0].spec.name = "head.weight".to_owned();
    renamed[0].spec.aliases = vec!["embedding.weight".to_owned()];
    load(&checkpoint, &mut renamed, &LoadOptions::default()).unwrap();
    assert_eq!(renamed[0].values, model(1)[0].values);

    let mut untied = blank(&model(1));
    untied[0].spec.aliases.clear();
    let mut head = untied[0].clone();
    head.spec.name = "head.weight".to_owned();
    untied.push(head);
    let found = differences(&checkpoint, &mut untied, &LoadOptions::default());
    let paths = "has the paths embedding.weight, head.weight in the checkpoint,";
    assert_eq!(found.len(), 2);
    assert!(found.iter().all(|difference| difference.contains(paths)), "{found:?}");
    load(&checkpoint, &mut untied, &allow(Allow { aliases: true, ..Allow::default() })).unwrap();
    assert_eq!(untied[0].values, untied[8].values);
    assert_eq!(untied[8].first, model(1)[0].first);
}

#[test]
fn another_layout_is_named_and_never_taken_for_the_same() {
    let checkpoint = saved(&model(1));
    let mut other = blank(&model(1));
    other[0].layout = WeightLayout::Plain;
    let all =
        Allow { missing: true, unexpected: true, shape: true, dtype: true, aliases: true, groups: true };
    let found = differences(&checkpoint, &mut other, &allow(all));
    let layout =
        "parameter `embedding.weight` is laid out as [in, out] in the checkpoint, as in PyTorch in the model";
    assert_eq!(found, [layout]);
}

#[test]
fn what_is_asked_for_wrongly_is_named() {
    let checkpoint = saved(&model(1));
    let (mut values, mut others) = ([0.0; 3], [0.0; 3]);
    let wanted = |range, values| WantedParameter {
        spec: spec("tiny", &[2]),
        layout: WeightLayout::Plain,
        range,
        values,
        states: vec![],
    };
    let error = |wanted| {
        let wanted = Wanted { parameters: vec![wanted] };
        checkpoint.load(wanted, &LoadOptions::default(), &Solo).unwrap_err().to_string()
    };
    let beyond = error(wanted(0..3, Target::f32(&mut values)));
    assert!(beyond.contains("`tiny`: it has shape [2], but elements 0..3"), "{beyond}");
    let too_long = error(wanted(0..2, Target::f32(&mut others)));
    assert!(too_long.contains("there are 12 bytes for the values of 2 elements of f32"), "{too_long}");
}

#[test]
fn a_target_that_fails_is_named() {
    let checkpoint = saved(&[whole(spec("w", &[4]), 1)]);
    let mut full = |_: u64, _: &[u8]| Err("the disk is full".into());
    let target = Target::elsewhere(DType::F32, &mut full);
    let wanted = WantedParameter {
        spec: spec("w", &[4]),
        layout: WeightLayout::Plain,
        range: 0..4,
        values: target,
        states: vec![],
    };
    let options = LoadOptions { optimizer: false, ..LoadOptions::default() };
    let error = checkpoint.load(Wanted { parameters: vec![wanted] }, &options, &Solo).unwrap_err();
    assert_eq!(error.to_string(), "cannot put values of parameter `w` where they belong: the disk is full");
}

#[test]
fn a_buffer_below_two_chunks_is_refused() {
    let checkpoint = saved(&model(1));
    let options = LoadOptions { buffer: Bytes::new(1 << 20), ..LoadOptions::default() };
    let error = load(&checkpoint, &mut blank(&model(1)), &options).unwrap_err();
    assert!(error.to_string().contains("at least 2.0 MiB are needed"), "{error}");
}
