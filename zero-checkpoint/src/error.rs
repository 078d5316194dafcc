//! What can be wrong with a checkpoint.

use std::io;
use std::ops::Range;
use std::path::PathBuf;

use thiserror::Error;
use zero_core::{Bytes, DType, Rank};

use crate::coordinator::BoxError;
use crate::digest::Digest;
use crate::load::Difference;

/// Why weights or a checkpoint could not be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The file is not there, or may not be read.
    #[error("cannot open the weights {}: check the path and its permissions", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The operating system's reason.
        source: io::Error,
    },

    /// The file is there, but reading it failed.
    #[error("cannot read {bytes} bytes at offset {offset} of {}: check the disk or mount it is on", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Where the read began, in bytes.
        offset: u64,
        /// How much was to be read.
        bytes: u64,
        /// The operating system's reason.
        source: io::Error,
    },

    /// The file ends before what its header promises.
    #[error(
        "{} is truncated: {expected} bytes expected, {found} found; copy or download it again",
        path.display()
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The least length the file must have, in bytes.
        expected: u64,
        /// Its length, in bytes.
        found: u64,
    },

    /// The header is not one of a safetensors file, or contradicts itself.
    #[error("{} is not a valid safetensors file: {reason}; copy or export it again", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// No tensor has this name.
    #[error("{} has no tensor '{name}'; {}", path.display(), hint(nearest))]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The name asked for.
        name: String,
        /// The most similar names in the file, nearest first; at most three.
        nearest: Vec<String>,
    },

    /// The tensor's elements are of a type that this crate does not handle.
    #[error("tensor '{name}' in {} holds {dtype}, which cannot be read; convert it to f32 first", path.display())]
    UnsupportedDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The format's name of the type.
        dtype: String,
    },

    /// The tensor's elements are of another type than the one asked for.
    #[error(
        "tensor '{name}' in {} holds {found}, not {expected}; read it as {found} or convert the file",
        path.display()
    )]
    WrongDType {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The type asked for.
        expected: DType,
        /// The type in the file.
        found: DType,
    },

    /// The range of elements does not lie within the tensor.
    #[error(
        "elements {}..{} of tensor '{name}' in {} were asked for, but it has {numel}; \
         check the partition against the tensor's shape",
        range.start, range.end, path.display()
    )]
    OutOfBounds {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The elements asked for.
        range: Range<usize>,
        /// How many elements the tensor has.
        numel: usize,
    },

    /// Values do not fill the matrix they are said to be.
    #[error("{len} values are no matrix of {rows} x {cols}; pass the shape that the file states")]
    NotAMatrix {
        /// Rows of the matrix.
        rows: usize,
        /// Columns of the matrix.
        cols: usize,
        /// How many values there are.
        len: usize,
    },

    /// A storage could not do what was asked of it.
    #[error("cannot {action} {path}: {source}; check the path, its permissions and the room on its medium")]
    Storage {
        /// What was to be done.
        action: &'static str,
        /// To what.
        path: String,
        /// The medium's reason.
        source: io::Error,
    },

    /// There is no complete checkpoint.
    #[error("there is no complete checkpoint in {place}; check the path, or start without one")]
    NoCheckpoint {
        /// Where.
        place: String,
    },

    /// There is no complete checkpoint of this step.
    #[error("there is no complete checkpoint of step {step} in {place}, but of {}", list(steps))]
    NoStep {
        /// Where.
        place: String,
        /// The step asked for.
        step: u64,
        /// The steps there are.
        steps: Vec<u64>,
    },

    /// There is a checkpoint of this step, and the storage cannot replace one at once.
    #[error("{place} has a checkpoint of step {step} already; remove it, or save to another place")]
    StepExists {
        /// Where.
        place: String,
        /// The step.
        step: u64,
    },

    /// Somebody removes what a save makes.
    #[error(
        "step {step} cannot be saved: somebody removes its folder from {place} as soon as it is there; let one run save there"
    )]
    Swept {
        /// Where.
        place: String,
        /// The step.
        step: u64,
    },

    /// A manifest is not what was written, or makes no sense.
    #[error("{path} is not a valid manifest: {reason}; copy the checkpoint again, or use an older one")]
    Manifest {
        /// The manifest.
        path: String,
        /// What is wrong with it.
        reason: String,
    },

    /// A manifest has a newer format.
    #[error("{path} has version {found} of the format, of which this program knows {known}; use a newer one")]
    NewerVersion {
        /// The manifest.
        path: String,
        /// Its version.
        found: u32,
        /// The newest version known.
        known: u32,
    },

    /// A file is longer or shorter than what was saved.
    #[error(
        "{path} has {found} bytes, but {expected} were saved; copy the checkpoint again, or use an older one"
    )]
    FileLength {
        /// The file.
        path: String,
        /// The bytes saved.
        expected: u64,
        /// The bytes there are.
        found: u64,
    },

    /// Part of a file is not what was saved.
    #[error(
        "{path}: the {bytes} bytes at {offset} are not what was saved (hash {found}, expected {expected}); copy the \
         checkpoint again, or use an older one"
    )]
    Corrupt {
        /// The file.
        path: String,
        /// Where the part begins, in bytes.
        offset: u64,
        /// Its length.
        bytes: u64,
        /// The hash of what was saved.
        expected: Digest,
        /// The hash of what is there.
        found: Digest,
    },

    /// What is to be saved is not right.
    #[error("cannot save parameter `{parameter}`: {reason}")]
    Contents {
        /// The parameter.
        parameter: String,
        /// What is wrong.
        reason: String,
    },

    /// What is to be recorded besides numbers is not right.
    #[error("cannot save step {step}: {reason}")]
    Facts {
        /// The step.
        step: u64,
        /// What is wrong.
        reason: String,
    },

    /// What is asked for is not right.
    #[error("cannot load parameter `{parameter}`: {reason}")]
    Wanted {
        /// The parameter.
        parameter: String,
        /// What is wrong.
        reason: String,
    },

    /// Ranks save different steps.
    #[error("rank 0 saves step {step}, {rank} saves step {other}; all ranks must save together")]
    Steps {
        /// The root's step.
        step: u64,
        /// The other rank.
        rank: Rank,
        /// Its step.
        other: u64,
    },

    /// Ranks save different numbers of parameters.
    #[error(
        "{rank} saves {found} parameters, rank 0 saves {expected}; every rank must name all, with empty intervals for \
         what it does not hold"
    )]
    ParameterCounts {
        /// The other rank.
        rank: Rank,
        /// Its number.
        found: usize,
        /// The root's number.
        expected: usize,
    },

    /// What is to be saved could not be read.
    #[error("cannot read {what} of parameter `{parameter}` to save them: {source}")]
    Source {
        /// The parameter.
        parameter: String,
        /// `values`, or the name of a state.
        what: String,
        /// The reason.
        source: BoxError,
    },

    /// What was loaded could not be put where it belongs.
    #[error("cannot put {what} of parameter `{parameter}` where they belong: {source}")]
    Target {
        /// The parameter.
        parameter: String,
        /// `values`, or the name of a state.
        what: String,
        /// The reason.
        source: BoxError,
    },

    /// Checkpoint and model do not go together.
    #[error(
        "{place} does not go with the model: {}; change the model, or allow this kind of difference",
        list(differences)
    )]
    Differences {
        /// The checkpoint.
        place: String,
        /// All differences that are not allowed.
        differences: Vec<Difference>,
    },

    /// It failed on another rank, and so on this one.
    #[error("not done, because {rank} failed: {reason}")]
    Elsewhere {
        /// The rank.
        rank: Rank,
        /// Its error.
        reason: String,
    },

    /// Ranks could not talk to each other.
    #[error("the ranks that save or load together lost each other: {source}")]
    Coordination {
        /// The reason, which names the ranks.
        source: BoxError,
    },

    /// A save began before the last one had ended.
    #[error("step {step} is not saved: step {saving} is still being saved; save less often, or wait")]
    Busy {
        /// The step that was to be saved.
        step: u64,
        /// The one that is being saved.
        saving: u64,
    },

    /// A rank could not begin a save; what the other ranks hear of it.
    #[error("step {step} could not be saved: {reason}")]
    NotSaved {
        /// The step.
        step: u64,
        /// The reason.
        reason: String,
    },

    /// A rank could not begin to load; what the other ranks hear of it.
    #[error("{reason}")]
    NotLoaded {
        /// The reason.
        reason: String,
    },

    /// The saver has returned this save's error already.
    #[error("the error of saving step {step} was returned by a call of the saver")]
    AlreadyTold {
        /// The step.
        step: u64,
    },

    /// A thread that reads or writes has panicked.
    #[error("a thread that reads or writes checkpoints is gone; its panic tells why")]
    WorkerGone,

    /// A thread could not be started.
    #[error("cannot start the thread that saves: {source}; allow more threads, or save without it")]
    NoThread {
        /// The system's reason.
        source: io::Error,
    },

    /// A buffer is too small to work with.
    #[error("a buffer of {bytes} is too small: at least {least} are needed")]
    BufferTooSmall {
        /// Its size.
        bytes: Bytes,
        /// The least size.
        least: Bytes,
    },

    /// An index of weights does not go with its files.
    #[error("{} is not a valid index of weights: {reason}; copy or download it again", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// A table of names gives two tensors one name.
    #[error("{}: tensors `{first}` and `{second}` are both called `{name}`; change the table of names", path.display())]
    TwoNames {
        /// The file or index.
        path: PathBuf,
        /// The name in the model.
        name: String,
        /// The one tensor.
        first: String,
        /// The other.
        second: String,
    },

    /// What is to be made is there already.
    #[error("{} is there already; remove it, or name another folder", path.display())]
    OutputExists {
        /// The folder.
        path: PathBuf,
    },

    /// There is not enough memory.
    #[error("no memory for a buffer of {bytes} bytes; save without a snapshot, or allow smaller buffers")]
    NoMemory {
        /// Its size.
        bytes: u64,
    },

    /// A checkpoint that need not be there cannot be removed. All others were tried too.
    #[error("cannot remove step {step}: {source}; removed: {}", list(removed))]
    Pruned {
        /// The steps removed.
        removed: Vec<u64>,
        /// The first step that cannot be.
        step: u64,
        /// Why.
        source: Box<Self>,
    },

    /// Nothing that would be kept is good, so nothing is removed.
    #[error(
        "none of the checkpoints to keep in {place} is good, so none is removed; look with `zero-ckpt verify`"
    )]
    NoneGood {
        /// Where.
        place: String,
    },
}

fn list<T: std::fmt::Display>(items: &[T]) -> String {
    if items.is_empty() {
        return "nothing".to_owned();
    }
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn hint(nearest: &[String]) -> String {
    match nearest {
        [] => "it has no tensors at all".to_owned(),
        _ => format!("the most similar names are '{}'", nearest.join("', '")),
    }
}
