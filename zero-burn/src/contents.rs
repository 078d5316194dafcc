//! What goes into a checkpoint.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};
use zero_checkpoint::{
    BoxError, Contents, Data, Facts, Held, MeshAxis, ParameterGroup, ReadBytes, SavedParameter, SavedState,
    TrainingState,
};
use zero_comm::Region;
use zero_core::{DType, ParameterIndex, Precision};

use crate::ZeroError;
use crate::checkpoints::Notes;
use crate::engine::{Engine, lock};
use crate::group::GroupRate;
use crate::host::HostTensor;
use crate::kept::{Kept, pieces};
use crate::optimizer::ZeroOptimizer;
use crate::progress::Progress;
use crate::rule::{Host, ShardOptimizer};

/// Runs `save` with all that this rank has to bring.
pub(crate) fn with<O: ShardOptimizer, T>(
    engine: &Engine,
    optimizer: &mut ZeroOptimizer<O>,
    notes: Notes,
    save: impl FnOnce(&Contents<'_>) -> Result<T, ZeroError>,
) -> Result<T, ZeroError> {
    let tensors = optimizer.groups.iter().map(|group| group.optimizer.tensors(Host(engine)));
    let tensors: Vec<_> = engine.together(tensors.collect::<Result<_, _>>())?;
    optimizer.states.iter_mut().flatten().for_each(Kept::rest);
    let parameters = engine.layout.parameters();
    let values: Vec<_> = parameters.iter().map(|parameter| Values::new(engine, parameter.index())).collect();
    let kept = |index: usize| match optimizer.updates[index] {
        0 => &[][..],
        _ => &tensors[optimizer.group_of[index]][..],
    };
    let states: Vec<Vec<_>> = (0..parameters.len())
        .map(|index| {
            let state = optimizer.states[index].as_ref();
            (0..kept(index).len()).map(|tensor| StateTensor { state, tensor }).collect()
        })
        .collect();
    let replicated = !engine.config.stage.shards_optimizer() && engine.world() > 1;
    let saved = parameters.iter().map(|parameter| {
        let index = parameter.index().index();
        let states = kept(index).iter().zip(&states[index]).map(|((name, dtype), tensor)| SavedState {
            name: name.clone(),
            data: Data::elsewhere(*dtype, tensor),
        });
        SavedParameter {
            spec: parameter.spec().clone(),
            layout: engine.weight_layout(parameter.index()),
            group: Some(optimizer.groups[optimizer.group_of[index]].pattern.clone()),
            updates: optimizer.updates[index],
            held: match replicated {
                true => Held::Replica,
                false => Held::Part(engine.holdings.owned(parameter.index())),
            },
            values: Data::elsewhere(DType::F32, &values[index]),
            states: states.collect(),
        }
    });
    let contents = Contents {
        rank_state: notes.rank.clone(),
        facts: facts(engine, optimizer, notes),
        parameters: saved.collect(),
    };
    save(&contents)
}

fn facts<O: ShardOptimizer>(engine: &Engine, optimizer: &ZeroOptimizer<O>, notes: Notes) -> Facts {
    let Precision { compute, accumulate, optimizer_state, .. } = engine.config.precision;
    let dtypes = [
        ("compute", compute),
        ("reduce", engine.config.precision.reduce()),
        ("accumulate", accumulate),
        ("master", DType::F32),
        ("optimizer_state", optimizer_state),
    ];
    let names = engine.layout.parameters().iter().map(|parameter| parameter.name().to_owned());
    let scalars: BTreeMap<String, Map<String, Value>> = names
        .zip(&optimizer.states)
        .zip(&optimizer.updates)
        .filter(|(_, updates)| **updates > 0)
        .filter_map(|((name, state), _)| Some((name, state.as_ref()?.scalars())))
        .filter(|(_, scalars)| !scalars.is_empty())
        .collect();
    let progress = Progress { steps: optimizer.step, skipped: optimizer.skipped, scalars };
    let groups = optimizer.groups.iter().map(|group| {
        let mut hyper_parameters = group.optimizer.hyper_parameters();
        hyper_parameters.insert(String::from("rate"), rate(group.rate));
        ParameterGroup { name: group.pattern.clone(), hyper_parameters }
    });
    Facts {
        step: optimizer.step,
        mesh: vec![MeshAxis { name: String::from("shard"), size: engine.world() }],
        stage: engine.config.stage,
        dtypes: dtypes.into_iter().map(|(name, dtype)| (name.to_owned(), dtype)).collect(),
        groups: groups.collect(),
        training: TrainingState {
            optimizer: progress.to_json(),
            schedule: notes.schedule,
            loss_scale: serde_json::to_value(*lock(&engine.scale)).unwrap_or_default(),
            rng: notes.rng,
            data: notes.data,
        },
        registry: notes.registry,
    }
}

fn rate(rate: GroupRate) -> Value {
    match rate {
        GroupRate::Times(factor) => json!({ "times": factor }),
        GroupRate::Own(own) => json!({ "own": own }),
    }
}

/// The rate of a group as [`facts`] writes it.
pub(crate) fn rate_from(hyper_parameters: &Map<String, Value>) -> Option<GroupRate> {
    let rate = hyper_parameters.get("rate")?;
    let number = |key: &str| rate.get(key).and_then(Value::as_f64);
    number("times").map(GroupRate::Times).or_else(|| number("own").map(GroupRate::Own))
}

/// This rank's master weights of a parameter: in memory, and the rest on a disk.
struct Values<'a> {
    engine: &'a Engine,
    parameter: ParameterIndex,
    in_memory: HostTensor,
}

impl<'a> Values<'a> {
    fn new(engine: &'a Engine, parameter: ParameterIndex) -> Self {
        Self { engine, parameter, in_memory: HostTensor::new(engine.held(parameter).shard) }
    }
}

impl ReadBytes for Values<'_> {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BoxError> {
        let here = self.in_memory.bytes();
        for piece in pieces([here.len() as u64, u64::MAX / 2], offset, into.len()) {
            let into = &mut into[piece.bytes];
            match (piece.place, self.engine.masters_on_disk()) {
                (1, Some(masters)) => masters.read(self.parameter, piece.offset, into)?,
                _ => into.copy_from_slice(&here[piece.offset as usize..][..into.len()]),
            }
        }
        Ok(())
    }
}

/// One tensor of a state; there is none where this rank has no elements.
struct StateTensor<'a, S> {
    state: Option<&'a S>,
    tensor: usize,
}

impl<S: Kept + Sync> ReadBytes for StateTensor<'_, S> {
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), BoxError> {
        self.state.ok_or("this rank has no state of it")?.read(self.tensor, offset, into)
    }
}
