//! A model of awkward parameters, ranks that are threads, and places that count.

#![allow(dead_code, reason = "each test uses a part")]

pub(crate) mod group;
pub(crate) mod power;
pub(crate) mod watched;

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use serde_json::json;
use zero_checkpoint::{
    BoxError, Checkpoint, CheckpointError, Contents, Coordinator, Data, Facts, Held, LoadOptions, LoadReport,
    MeshAxis, ModelIdentity, ParameterGroup, ReadBytes, Saved, SavedParameter, SavedState, Saver,
    SaverOptions, Storage, Target, Wanted, WantedParameter, WantedState, WeightLayout, WriteBytes,
};
use zero_core::{DType, ParameterSpec, Partition, Rank, Stage, WorldSize};

pub(crate) use group::ranks;

/// A parameter as one rank would hold it alone.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Whole {
    pub(crate) spec: ParameterSpec,
    pub(crate) layout: WeightLayout,
    pub(crate) group: Option<String>,
    pub(crate) updates: u64,
    pub(crate) values: Vec<f32>,
    pub(crate) first: Option<Vec<f32>>,
    pub(crate) second: Option<Vec<bf16>>,
}

pub(crate) fn spec(name: &str, shape: &[usize]) -> ParameterSpec {
    let (name, shape) = (name.to_owned(), shape.to_vec());
    ParameterSpec { name, shape, dtype: DType::F32, trainable: true, aliases: vec![] }
}

/// Numbers that differ by parameter, element and seed, all bit patterns of finite floats among them.
fn number(seed: u64, index: usize) -> f32 {
    let mut state =
        seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (index as u64).wrapping_mul(0xD1B5_4A32_D192_ED03);
    state ^= state >> 29;
    state = state.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    f32::from_bits((state >> 32) as u32 & 0xBFFF_FFFF)
}

pub(crate) fn whole(spec: ParameterSpec, seed: u64) -> Whole {
    let numel: usize = spec.shape.iter().product();
    let numbers = |salt: u64| (0..numel).map(move |index| number(seed * 4 + salt, index));
    let trainable = spec.trainable;
    Whole {
        layout: if spec.shape.len() == 2 { WeightLayout::InOut } else { WeightLayout::Plain },
        group: trainable.then(|| if spec.shape.len() < 2 { "no_decay" } else { "decay" }.to_owned()),
        updates: if trainable { 7 } else { 0 },
        values: numbers(0).collect(),
        first: trainable.then(|| numbers(1).collect()),
        second: trainable.then(|| numbers(2).map(bf16::from_f32).collect()),
        spec,
    }
}

/// Tied, frozen, scalar, empty and tiny parameters, and one that has not been updated yet.
pub(crate) fn model(seed: u64) -> Vec<Whole> {
    let mut embedding = spec("embedding.weight", &[19, 6]);
    embedding.aliases = vec!["head.weight".to_owned()];
    let frozen = ParameterSpec { trainable: false, ..spec("frozen.weight", &[5, 7]) };
    let specs = [
        embedding,
        spec("blocks.0.linear.weight", &[6, 12]),
        spec("blocks.0.linear.bias", &[12]),
        frozen,
        spec("scale", &[]),
        spec("empty", &[3, 0]),
        spec("tiny", &[2]),
        spec("added.weight", &[4]),
    ];
    let mut all: Vec<_> =
        specs.into_iter().enumerate().map(|(at, spec)| whole(spec, seed * 100 + at as u64)).collect();
    let added = all.last_mut().expect("stated above");
    (added.first, added.second, added.updates) = (None, None, 0);
    all
}

pub(crate) fn facts(step: u64, stage: Stage, world: usize) -> Facts {
    let group = |name: &str, decay: f64| ParameterGroup {
        name: name.to_owned(),
        hyper_parameters: json!({"weight_decay": decay, "lr": 0.1 + 0.2})
            .as_object()
            .cloned()
            .unwrap_or_default(),
    };
    let mut facts = Facts::new(step, stage);
    facts.mesh = vec![MeshAxis { name: "shard".to_owned(), size: world }];
    facts.dtypes = [("compute".to_owned(), DType::BF16)].into();
    facts.groups = vec![group("decay", 0.1), group("no_decay", 0.0)];
    facts.training.schedule = json!({"kind": "cosine", "lr": 1.0e-3 / 3.0});
    facts.training.loss_scale = json!({"scale": 65536.0, "good_steps": 17});
    facts.training.rng = json!({"seed": u64::MAX, "draws": 12345});
    facts.training.data = json!({"epoch": 3, "sample": 4711});
    facts.registry.model = Some(ModelIdentity { name: "awkward".to_owned(), version: "1".to_owned() });
    facts.registry.config = json!({"b": 1, "a": {"d": 2, "c": 3}});
    facts
}

/// Which elements of a parameter a rank holds.
pub(crate) fn held(whole: &Whole, stage: Stage, rank: Rank, world: WorldSize) -> Held {
    let replica = stage == Stage::Zero || (stage != Stage::Three && !whole.spec.trainable);
    if replica { Held::Replica } else { Held::Part(Partition::new(whole.values.len(), world).range(rank)) }
}

pub(crate) fn range(whole: &Whole, held: &Held) -> Range<usize> {
    match held {
        Held::Replica => 0..whole.values.len(),
        Held::Part(range) => range.clone(),
    }
}

/// Bytes that can only be read by pieces, and refuse to be read twice as a whole.
pub(crate) struct Disk(pub(crate) Vec<u8>);

impl ReadBytes for Disk {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BoxError> {
        let start = offset as usize;
        into.copy_from_slice(self.0.get(start..start + into.len()).ok_or("read past the end")?);
        Ok(())
    }
}

impl WriteBytes for Disk {
    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), BoxError> {
        let start = offset as usize;
        self.0.get_mut(start..start + bytes.len()).ok_or("written past the end")?.copy_from_slice(bytes);
        Ok(())
    }
}

/// The contents of one rank; `offloaded` is where first moments lie, if not in memory.
pub(crate) fn contents<'a>(
    model: &'a [Whole],
    offloaded: Option<&'a [Disk]>,
    facts: Facts,
    rank: Rank,
    world: WorldSize,
) -> Contents<'a> {
    let stage = facts.stage;
    let parameter = |(at, whole): (usize, &'a Whole)| {
        let held = held(whole, stage, rank, world);
        let range = range(whole, &held);
        let mut states = Vec::new();
        if let Some(first) = &whole.first {
            let data = match offloaded {
                Some(disks) => Data::elsewhere(DType::F32, &disks[at]),
                None => Data::f32(&first[range.clone()]),
            };
            states.push(SavedState { name: "first_moment".to_owned(), data });
        }
        if let Some(second) = &whole.second {
            let bytes = bytemuck::cast_slice(&second[range.clone()]);
            states
                .push(SavedState { name: "second_moment".to_owned(), data: Data::bytes(DType::BF16, bytes) });
        }
        SavedParameter {
            spec: whole.spec.clone(),
            layout: whole.layout,
            group: whole.group.clone(),
            updates: whole.updates,
            values: Data::f32(&whole.values[range]),
            held,
            states,
        }
    };
    let parameters = model.iter().enumerate().map(parameter).collect();
    Contents { facts, rank_state: json!({"rank": rank.index()}), parameters }
}

/// What a rank's first moments are on its disk.
pub(crate) fn disks(model: &[Whole], stage: Stage, rank: Rank, world: WorldSize) -> Vec<Disk> {
    let disk = |whole: &Whole| {
        let range = range(whole, &held(whole, stage, rank, world));
        let first = whole.first.as_ref().map(|first| bytemuck::cast_slice(&first[range]).to_vec());
        Disk(first.unwrap_or_default())
    };
    model.iter().map(disk).collect()
}

/// Saves a model over `world` ranks.
pub(crate) fn save(
    storage: &Arc<dyn Storage>,
    model: &[Whole],
    step: u64,
    stage: Stage,
    world: usize,
) -> Vec<Saved> {
    ranks(world, |group| {
        let (rank, size) = (group.rank(), group.world_size());
        let mut saver = Saver::new(Arc::clone(storage), Arc::new(group), SaverOptions::default()).unwrap();
        saver.save(&contents(model, None, facts(step, stage, world), rank, size)).unwrap()
    })
}

/// Zeros in the place of a model's numbers.
pub(crate) fn blank(model: &[Whole]) -> Vec<Whole> {
    let mut blank = model.to_vec();
    for whole in &mut blank {
        whole.values.fill(0.0);
        whole.first.iter_mut().for_each(|first| first.fill(0.0));
        whole.second.iter_mut().for_each(|second| second.fill(bf16::ZERO));
        whole.updates = 0;
        whole.group = None;
    }
    blank
}

/// What a rank asks for; everything goes into `model`, first moments by way of `disks` if there are some.
pub(crate) fn wanted<'a>(
    model: &'a mut [Whole],
    mut disks: Option<&'a mut [Disk]>,
    stage: Stage,
    rank: Rank,
    world: WorldSize,
) -> Wanted<'a> {
    let mut parameters = Vec::new();
    for whole in model {
        let range = range(whole, &held(whole, stage, rank, world));
        let disk = match disks.take() {
            Some(rest) => {
                let (disk, rest) = rest.split_first_mut().expect("one for each parameter");
                disks = Some(rest);
                Some(disk)
            }
            None => None,
        };
        let mut states = Vec::new();
        if let Some(first) = &mut whole.first {
            let target = match disk {
                Some(disk) => Target::elsewhere(DType::F32, disk),
                None => Target::f32(&mut first[range.clone()]),
            };
            states.push(WantedState { name: "first_moment".to_owned(), target });
        }
        if let Some(second) = &mut whole.second {
            let bytes = bytemuck::cast_slice_mut(&mut second[range.clone()]);
            states.push(WantedState {
                name: "second_moment".to_owned(),
                target: Target::bytes(DType::BF16, bytes),
            });
        }
        let values = Target::f32(&mut whole.values[range.clone()]);
        parameters.push(WantedParameter {
            spec: whole.spec.clone(),
            layout: whole.layout,
            range,
            values,
            states,
        });
    }
    Wanted { parameters }
}

/// What one rank holds after a load, with zeros where it holds nothing.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    model: &[Whole],
    stage: Stage,
    group: &dyn Coordinator,
) -> Result<(Vec<Whole>, LoadReport), CheckpointError> {
    let mut loaded = blank(model);
    let wanted = wanted(&mut loaded, None, stage, group.rank(), group.world_size());
    let report = checkpoint.load(wanted, &LoadOptions::default(), group)?;
    for (whole, parameter) in loaded.iter_mut().zip(&report.parameters) {
        (whole.updates, whole.group) = (parameter.updates, parameter.group.clone());
    }
    Ok((loaded, report))
}

/// Bits, so that NaN equals itself.
pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Asserts that what a rank holds is what was saved, to the bit, and that it has nothing else.
pub(crate) fn assert_holds(loaded: &[Whole], saved: &[Whole], stage: Stage, rank: Rank, world: WorldSize) {
    for (loaded, saved) in loaded.iter().zip(saved) {
        let name = &saved.spec.name;
        let range = range(saved, &held(saved, stage, rank, world));
        let mut expected = blank(std::slice::from_ref(saved)).remove(0);
        expected.values[range.clone()].copy_from_slice(&saved.values[range.clone()]);
        assert_eq!(bits(&loaded.values), bits(&expected.values), "values of {name} on {rank} of {world}");
        if let (Some(expected), Some(saved), Some(loaded)) =
            (&mut expected.first, &saved.first, &loaded.first)
        {
            expected[range.clone()].copy_from_slice(&saved[range.clone()]);
            assert_eq!(bits(loaded), bits(expected), "first moment of {name} on {rank} of {world}");
        }
        if let (Some(expected), Some(saved), Some(loaded)) =
            (&mut expected.second, &saved.second, &loaded.second)
        {
            expected[range.clone()].copy_from_slice(&saved[range]);
            let bits = |values: &[bf16]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(loaded), bits(expected), "second moment of {name} on {rank} of {world}");
        }
        assert_eq!(loaded.updates, saved.updates, "{name}");
        assert_eq!(loaded.group, saved.group, "{name}");
    }
}
