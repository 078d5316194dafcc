//! What is to be saved, as ranks tell each other of it.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use zero_core::Rank;

use crate::coordinator::Coordinator;
use crate::digest::Digest;
use crate::error::CheckpointError;
use crate::manifest::{Facts, FileRecord, Manifest, MeshAxis, ParameterRecord, Piece, numel};
use crate::save::contents::{Contents, Declared, Held, SavedParameter};
use crate::save::image::{Entry, Image};
use crate::save::write::CHUNK;

/// What is to be saved, without the numbers.
pub(crate) struct Job {
    pub(crate) facts: Facts,
    rank_state: Value,
    declared: Vec<Declared>,
    held: Vec<Range<usize>>,
    pub(crate) image: Image,
}

/// What a rank says first.
#[derive(Serialize, Deserialize)]
pub(crate) struct Opening {
    step: u64,
    /// By parameter: the hash of what it declares, and what it holds.
    parameters: Vec<(Digest, Range<usize>)>,
}

/// What a rank has written.
#[derive(Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) file: Option<FileRecord>,
    tensors: Vec<Written>,
    rank_state: Value,
}

impl Report {
    /// Before anything is written.
    fn nothing() -> Self {
        Self { file: None, tensors: Vec::new(), rank_state: Value::Null }
    }
}

#[derive(Serialize, Deserialize)]
struct Written {
    parameter: usize,
    state: Option<String>,
    start: usize,
    end: usize,
    offset: u64,
}

impl Job {
    /// Checks what this rank can tell alone.
    pub(crate) fn new(
        contents: &Contents<'_>,
        coordinator: &dyn Coordinator,
    ) -> Result<Self, CheckpointError> {
        contents.parameters.iter().try_for_each(SavedParameter::check)?;
        let held = |parameter: &SavedParameter<'_>| match &parameter.held {
            Held::Part(range) => range.clone(),
            Held::Replica => 0..parameter.numel().unwrap_or_default(),
        };
        let job = Self {
            facts: contents.facts.clone(),
            rank_state: contents.rank_state.clone(),
            declared: contents.parameters.iter().map(Declared::of).collect(),
            held: contents.parameters.iter().map(held).collect(),
            image: Image::new(contents, coordinator.rank(), coordinator.world_size())?,
        };
        let unwritten = Report { rank_state: job.rank_state.clone(), ..Report::nothing() };
        job.manifest(vec![unwritten]).check_nesting().map_err(|reason| CheckpointError::Facts {
            step: job.facts.step,
            reason: format!("what is recorded besides numbers could not be read again: {reason}"),
        })?;
        Ok(job)
    }

    /// What this rank has written; no file if it had nothing to write.
    pub(crate) fn report(&self, file: Option<FileRecord>) -> Report {
        let written = |entry: &Entry| Written {
            parameter: entry.parameter,
            state: entry.state_name.clone(),
            start: entry.range.start,
            end: entry.range.end,
            offset: entry.offset,
        };
        let tensors = self.image.entries.iter().map(written).collect();
        Report { file, tensors, rank_state: self.rank_state.clone() }
    }

    pub(crate) fn opening(&self) -> Opening {
        let parameters = self.declared.iter().map(Declared::digest).zip(self.held.iter().cloned()).collect();
        Opening { step: self.facts.step, parameters }
    }

    /// Checks that all ranks save the same, and that together they hold all of it once.
    pub(crate) fn check_openings(&self, openings: Vec<Opening>) -> Result<(), CheckpointError> {
        let unwritten = self.manifest(openings.iter().map(|_| Report::nothing()).collect());
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
        self.check_coverage(&openings)
    }

    /// Checks that each element of what is no replica is held once.
    fn check_coverage(&self, openings: &[Opening]) -> Result<(), CheckpointError> {
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
            let numel = numel(&declared.spec.shape).unwrap_or_default();
            if next != numel {
                return refused(format!("no rank holds its elements {next}..{numel}"));
            }
        }
        Ok(())
    }

    /// The manifest of what all ranks have written.
    pub(crate) fn manifest(&self, reports: Vec<Report>) -> Manifest {
        let (files, ranks, parameters) = self.records(reports);
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

    /// Files, what ranks have for themselves, and where in the files the parameters lie.
    fn records(&self, reports: Vec<Report>) -> (Vec<FileRecord>, Vec<Value>, Vec<ParameterRecord>) {
        let mut parameters: Vec<_> = self.declared.iter().map(Declared::record).collect();
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
        (files, ranks, parameters)
    }
}
