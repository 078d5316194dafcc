//! A checkpoint in words.

use std::fmt;

use serde_json::Value;
use zero_core::Bytes;

use crate::load::Checkpoint;
use crate::manifest::{Manifest, ParameterRecord};

/// A checkpoint for people to read; displays as several lines.
#[derive(Clone, Copy, Debug)]
pub struct Summary<'a> {
    checkpoint: &'a Checkpoint,
}

impl<'a> Summary<'a> {
    /// The summary of a checkpoint.
    pub fn of(checkpoint: &'a Checkpoint) -> Self {
        Self { checkpoint }
    }
}

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let manifest = self.checkpoint.manifest();
        writeln!(f, "{}", self.checkpoint.place())?;
        let axes = manifest.mesh.iter().map(|axis| format!("{} {}", axis.name, axis.size));
        let axes = axes.collect::<Vec<_>>().join(" x ");
        let size = Bytes::new(manifest.bytes());
        writeln!(
            f,
            "  step {}, {}, ranks: {axes}, format {}",
            manifest.step, manifest.stage, manifest.format_version
        )?;
        writeln!(
            f,
            "  {} parameters, {} elements, {size} in {} files",
            manifest.parameters.len(),
            manifest.numel(),
            manifest.files.len()
        )?;
        registry(manifest, f)?;
        for (what, dtype) in &manifest.dtypes {
            writeln!(f, "  {what}: {dtype}")?;
        }
        let training = &manifest.training;
        for (what, value) in [
            ("schedule", &training.schedule),
            ("loss scale", &training.loss_scale),
            ("random numbers", &training.rng),
            ("data", &training.data),
        ] {
            if !value.is_null() {
                writeln!(f, "  {what}: {value}")?;
            }
        }
        for group in &manifest.groups {
            writeln!(f, "  group {}: {}", group.name, Value::Object(group.hyper_parameters.clone()))?;
        }
        manifest.parameters.iter().try_for_each(|parameter| line(parameter, f))
    }
}

fn registry(manifest: &Manifest, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let registry = &manifest.registry;
    if let Some(model) = &registry.model {
        writeln!(f, "  model {} {}", model.name, model.version)?;
    }
    if let Some(revision) = &registry.code_revision {
        writeln!(f, "  code {revision}")?;
    }
    if let Some(hash) = &registry.config_hash {
        writeln!(f, "  configuration {hash}")?;
    }
    if let Some(parent) = &registry.parent {
        writeln!(f, "  after {parent}")?;
    }
    for (name, version) in &registry.frameworks {
        writeln!(f, "  by {name} {version}")?;
    }
    for (tag, value) in &registry.tags {
        writeln!(f, "  {tag}: {value}")?;
    }
    Ok(())
}

fn line(parameter: &ParameterRecord, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "  {} {:?} {}", parameter.name, parameter.shape, parameter.values.dtype)?;
    if !parameter.trainable {
        write!(f, ", frozen")?;
    }
    for alias in &parameter.aliases {
        write!(f, ", also {alias}")?;
    }
    if let Some(group) = &parameter.group {
        write!(f, ", group {group}")?;
    }
    if parameter.updates > 0 {
        write!(f, ", {} updates", parameter.updates)?;
    }
    for (name, state) in &parameter.states {
        write!(f, ", {name} {}", state.dtype)?;
    }
    writeln!(f)
}
