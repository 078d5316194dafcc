//! The two phases of a save: every rank writes its file, then the root makes the checkpoint of them.
//!
//! What holds at every moment, so that a crash anywhere leaves the newest complete checkpoint: a folder has a checkpoint's
//! name only from the rename on, which comes after the manifest and every file are durable, as is the folder that names
//! them. Where folders cannot be renamed, a manifest is what makes a checkpoint, and it comes last, as a whole.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_core::Rank;

use crate::coordinator::{Coordinator, consult};
use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::folder::{self, StepFolder};
use crate::manifest::{Facts, FileRecord, Manifest, MeshAxis, NAME, ParameterRecord, Piece, TensorRecord};
use crate::save::contents::{Contents, Declared, Held};
use crate::save::image::Image;
use crate::save::leftovers;
use crate::save::retention::{self, Retention};
use crate::save::write::{CHUNK, Stopped};
use crate::storage::{Storage, Usage, WriteFile};

/// What a save wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// The step.
    pub step: u64,
    /// The checkpoint's folder, in its storage.
    pub folder: String,
    /// What this rank wrote, in bytes.
    pub bytes: u64,
    /// What all ranks wrote, in bytes.
    pub total_bytes: u64,
}

/// What is to be saved, without the numbers.
pub(crate) struct Job {
    facts: Facts,
    rank_state: Value,
    declared: Vec<Declared>,
    held: Vec<Range<usize>>,
    pub(crate) image: Image,
}

/// Where a job's numbers are written from.
pub(crate) trait Content {
    fn write(&mut self, image: &Image, file: &mut dyn WriteFile) -> Result<Vec<Digest>, Stopped>;
}

impl Job {
    /// Checks what this rank can tell alone.
    pub(crate) fn new(
        contents: &Contents<'_>,
        coordinator: &dyn Coordinator,
    ) -> Result<Self, CheckpointError> {
        contents.parameters.iter().try_for_each(|parameter| parameter.check())?;
        let held = |parameter: &crate::save::SavedParameter<'_>| match &parameter.held {
            Held::Part(range) => range.clone(),
            Held::Replica => 0..parameter.numel().unwrap_or_default(),
        };
        Ok(Self {
            facts: contents.facts.clone(),
            rank_state: contents.rank_state.clone(),
            declared: contents.parameters.iter().map(Declared::of).collect(),
            held: contents.parameters.iter().map(held).collect(),
            image: Image::new(contents, coordinator.rank(), coordinator.world_size())?,
        })
    }
}

/// What a rank says first.
#[derive(Serialize, Deserialize)]
struct Opening {
    step: u64,
    /// By parameter: the hash of what it declares, and what it holds.
    parameters: Vec<(Digest, Range<usize>)>,
}

/// Where to write.
#[derive(Serialize, Deserialize)]
struct Staging {
    folder: String,
    /// Distinguishes the files from those of another attempt, where they cannot have a folder of their own.
    suffix: String,
}

/// What a rank has written.
#[derive(Serialize, Deserialize)]
struct Report {
    file: Option<FileRecord>,
    tensors: Vec<Written>,
    rank_state: Value,
}

#[derive(Serialize, Deserialize)]
struct Written {
    parameter: usize,
    state: Option<String>,
    start: usize,
    end: usize,
    offset: u64,
}

/// Saves together with all ranks: on all of them or on none. `job` is an error where a rank cannot take part.
pub(crate) fn run(
    storage: &Arc<dyn Storage>,
    coordinator: &dyn Coordinator,
    job: Result<&Job, CheckpointError>,
    content: &mut dyn Content,
    retention: Retention,
) -> Result<Saved, CheckpointError> {
    let storage = storage.as_ref();
    let mut mark = None;
    let mut staged = None;
    let done = phases(storage, coordinator, job, content, retention, &mut mark, &mut staged);
    if let (Err(_), Some(folder)) = (&done, staged) {
        // Of all ranks the root alone, which made it; what it cannot remove, a later save sweeps.
        let _ = storage.remove_folder(&folder);
    }
    done
}

fn phases(
    storage: &dyn Storage,
    coordinator: &dyn Coordinator,
    job: Result<&Job, CheckpointError>,
    content: &mut dyn Content,
    retention: Retention,
    mark: &mut Option<Box<dyn Send + Sync>>,
    staged: &mut Option<String>,
) -> Result<Saved, CheckpointError> {
    let (opening, job) = match job {
        Ok(job) => (Ok(to_bytes(&job.opening())), Some(job)),
        Err(error) => (Err(error), None),
    };
    let staging = consult(coordinator, opening, |openings| {
        let Some(job) = job else { return Ok(Vec::new()) };
        job.check_openings(openings.iter().map(|bytes| from_bytes(bytes)).collect::<Result<_, _>>()?)?;
        let staging = stage(storage, job.facts.step, mark)?;
        *staged = Some(staging.folder.clone());
        Ok(to_bytes(&staging))
    })?;
    let Some(job) = job else { return Err(CheckpointError::Coordination { source: NO_JOB.into() }) };
    let staging: Staging = from_bytes(&staging)?;

    let written = job.write_file(storage, coordinator, &staging, content, mark);
    let own_bytes =
        written.as_ref().ok().and_then(|report| report.file.as_ref()).map_or(0, |file| file.bytes);
    let total = consult(coordinator, written.map(|report| to_bytes(&report)), |reports| {
        let reports = reports.iter().map(|bytes| from_bytes(bytes)).collect::<Result<Vec<Report>, _>>()?;
        let manifest = job.manifest(reports);
        commit(storage, &staging, &manifest)?;
        *staged = None;
        retention::apply(storage, retention);
        // A checkpoint of the same step that this one has replaced.
        leftovers::sweep(storage);
        Ok(manifest.bytes().to_le_bytes().to_vec())
    })?;
    let total_bytes = u64::from_le_bytes(total.try_into().unwrap_or_default());
    let folder = StepFolder::of(job.facts.step).to_string();
    Ok(Saved { step: job.facts.step, folder, bytes: own_bytes, total_bytes })
}

const NO_JOB: &str = "the other ranks went on without this one";

/// A folder to write into, marked as in use.
fn stage(
    storage: &dyn Storage,
    step: u64,
    mark: &mut Option<Box<dyn Send + Sync>>,
) -> Result<Staging, CheckpointError> {
    leftovers::sweep(storage);
    let nonce = folder::nonce();
    let at_last = StepFolder::of(step).to_string();
    if !storage.renames() {
        if storage
            .list(&at_last)
            .map_err(folder::failed(storage, "list", &at_last))?
            .iter()
            .any(|name| name == NAME)
        {
            return Err(CheckpointError::StepExists { place: storage.to_string(), step });
        }
        storage.remove_folder(&at_last).map_err(folder::failed(storage, "empty", &at_last))?;
        return Ok(Staging { folder: at_last, suffix: format!("-{nonce}") });
    }
    let folder = folder::temporary(step, &nonce);
    storage.create_folder(&folder).map_err(folder::failed(storage, "make", &folder))?;
    *mark = storage.mark(&folder, Usage::Shared).map_err(folder::failed(storage, "mark", &folder))?;
    Ok(Staging { folder, suffix: String::new() })
}

/// Makes the files in a folder a checkpoint.
fn commit(storage: &dyn Storage, staging: &Staging, manifest: &Manifest) -> Result<(), CheckpointError> {
    let path = format!("{}/{NAME}", staging.folder);
    // What cannot be read must not be written.
    manifest.validate().map_err(|reason| CheckpointError::Manifest { path: path.clone(), reason })?;
    let bytes = manifest.to_bytes();
    let write = || {
        let mut file = storage.create(&path, bytes.len() as u64)?;
        file.write(&bytes)?;
        file.finish()
    };
    write().map_err(folder::failed(storage, "write", &path))?;
    storage.sync_folder(&staging.folder).map_err(folder::failed(storage, "sync", &staging.folder))?;
    if storage.renames() {
        let at_last = StepFolder::of(manifest.step).to_string();
        storage.rename(&staging.folder, &at_last).map_err(folder::failed(
            storage,
            "rename",
            &staging.folder,
        ))?;
        storage.sync_folder("").map_err(folder::failed(storage, "sync", ""))?;
    }
    Ok(())
}

impl Job {
    fn opening(&self) -> Opening {
        let parameters = self.declared.iter().map(Declared::digest).zip(self.held.iter().cloned()).collect();
        Opening { step: self.facts.step, parameters }
    }

    /// Checks that all ranks save the same, and that together they hold all of it once.
    fn check_openings(&self, openings: Vec<Opening>) -> Result<(), CheckpointError> {
        let nothing = || Report { file: None, tensors: Vec::new(), rank_state: Value::Null };
        let unwritten = self.manifest(openings.iter().map(|_| nothing()).collect());
        unwritten
            .validate_facts()
            .map_err(|reason| CheckpointError::Facts { step: self.facts.step, reason })?;
        let own = self.opening();
        for (index, opening) in openings.iter().enumerate() {
            let rank = Rank::new(index);
            if opening.step != own.step {
                let (step, other) = (own.step, opening.step);
                return Err(CheckpointError::Steps { step, rank, other });
            }
            if opening.parameters.len() != own.parameters.len() {
                let (found, expected) = (opening.parameters.len(), own.parameters.len());
                return Err(CheckpointError::ParameterCounts { rank, found, expected });
            }
            for ((declared, theirs), ours) in
                self.declared.iter().zip(&opening.parameters).zip(&own.parameters)
            {
                if theirs.0 != ours.0 {
                    return Err(CheckpointError::Contents {
                        parameter: declared.spec.name.clone(),
                        reason: format!(
                            "{rank} and rank 0 do not describe it alike: name, shape, dtype, trainable, aliases, \
                             layout, group, updates, replica or not, types and names of states must agree"
                        ),
                    });
                }
            }
        }
        for (index, declared) in self.declared.iter().enumerate().filter(|(_, declared)| !declared.replica) {
            let mut held: Vec<_> = openings
                .iter()
                .enumerate()
                .map(|(rank, opening)| (opening.parameters[index].1.clone(), rank))
                .filter(|(range, _)| !range.is_empty())
                .collect();
            held.sort_by_key(|(range, _)| range.start);
            let refused =
                |reason| Err(CheckpointError::Contents { parameter: declared.spec.name.clone(), reason });
            let mut next = 0;
            for (range, rank) in held {
                if range.start > next {
                    return refused(format!("no rank holds its elements {next}..{}", range.start));
                }
                if range.start < next {
                    return refused(format!(
                        "its elements {}..{next} are held by rank {rank} and by another one: one of them must \
                         bring an empty interval, or all ranks the whole as `Held::Replica`",
                        range.start
                    ));
                }
                next = range.end;
            }
            let numel = crate::manifest::numel(&declared.spec.shape).unwrap_or_default();
            if next != numel {
                return refused(format!("no rank holds its elements {next}..{numel}"));
            }
        }
        Ok(())
    }

    fn write_file(
        &self,
        storage: &dyn Storage,
        coordinator: &dyn Coordinator,
        staging: &Staging,
        content: &mut dyn Content,
        mark: &mut Option<Box<dyn Send + Sync>>,
    ) -> Result<Report, CheckpointError> {
        let mut report = Report { file: None, tensors: Vec::new(), rank_state: self.rank_state.clone() };
        if self.image.entries.is_empty() {
            return Ok(report);
        }
        if mark.is_none() && storage.renames() {
            *mark = storage.mark(&staging.folder, Usage::Shared).map_err(folder::failed(
                storage,
                "mark",
                &staging.folder,
            ))?;
        }
        let (rank, world) = (coordinator.rank().index(), coordinator.world_size().get());
        let name = format!("rank-{rank:05}-of-{world:05}{}.safetensors", staging.suffix);
        let path = format!("{}/{name}", staging.folder);
        let failed = |source| folder::failed(storage, "write", &path)(source);
        let mut file = storage.create(&path, self.image.bytes).map_err(failed)?;
        let chunks = content.write(&self.image, file.as_mut()).map_err(|stopped| match stopped {
            Stopped::File(source) => failed(source),
            Stopped::Source(error) => error,
        })?;
        let hash = Digest::of_chunks(&chunks);
        report.file = Some(FileRecord { name, bytes: self.image.bytes, hash, chunks });
        report.tensors = self.image.entries.iter().map(|entry| self.written(entry)).collect();
        Ok(report)
    }

    fn written(&self, entry: &crate::save::image::Entry) -> Written {
        Written {
            parameter: entry.parameter,
            state: entry.state_name.clone(),
            start: entry.range.start,
            end: entry.range.end,
            offset: entry.offset,
        }
    }

    /// The manifest of what all ranks have written.
    fn manifest(&self, reports: Vec<Report>) -> Manifest {
        let tensor = |dtype| TensorRecord { dtype, pieces: Vec::new() };
        let mut parameters: Vec<_> = self
            .declared
            .iter()
            .map(|declared| ParameterRecord {
                name: declared.spec.name.clone(),
                shape: declared.spec.shape.clone(),
                dtype: declared.spec.dtype,
                trainable: declared.spec.trainable,
                aliases: declared.spec.aliases.clone(),
                group: declared.group.clone(),
                layout: declared.layout,
                updates: declared.updates,
                values: tensor(declared.values),
                states: declared.states.iter().map(|(name, dtype)| (name.clone(), tensor(*dtype))).collect(),
            })
            .collect();
        let (mut files, mut ranks) = (Vec::new(), Vec::new());
        for report in reports {
            ranks.push(report.rank_state);
            let file = files.len();
            files.extend(report.file);
            for Written { parameter, state, start, end, offset } in report.tensors {
                let tensor = parameters.get_mut(parameter).and_then(|parameter| match state {
                    None => Some(&mut parameter.values),
                    Some(state) => parameter.states.get_mut(&state),
                });
                // What does not fit anywhere is missed by validation.
                if let Some(tensor) = tensor {
                    tensor.pieces.push(Piece { start, end, file, offset });
                }
            }
        }
        for tensor in parameters
            .iter_mut()
            .flat_map(|parameter| std::iter::once(&mut parameter.values).chain(parameter.states.values_mut()))
        {
            tensor.pieces.sort_by_key(|piece| piece.start);
        }
        let facts = self.facts.clone();
        let mesh = if facts.mesh.is_empty() {
            vec![MeshAxis { name: "shard".to_owned(), size: ranks.len() }]
        } else {
            facts.mesh
        };
        Manifest {
            format: Manifest::FORMAT.to_owned(),
            format_version: Manifest::VERSION,
            step: facts.step,
            mesh,
            stage: facts.stage,
            dtypes: facts.dtypes,
            groups: facts.groups,
            parameters,
            chunk_bytes: CHUNK as u64,
            files,
            training: facts.training,
            ranks,
            registry: facts.registry.completed(),
        }
    }
}

/// Messages between ranks of one job, which have the same code.
fn to_bytes(message: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(message).unwrap_or_default()
}

fn from_bytes<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, CheckpointError> {
    serde_json::from_slice(bytes).map_err(|error| CheckpointError::Coordination { source: error.into() })
}
