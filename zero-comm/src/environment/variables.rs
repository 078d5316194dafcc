//! The variables of all launchers, as they were found.

use std::ffi::OsString;
use std::str::FromStr;

use super::error::{EnvironmentError, FoundVariables};

/// Every variable that is read, in the order in which errors list them.
const NAMES: &[&str] = &[
    "ZERO_RENDEZVOUS",
    "ZERO_JOB_TOKEN",
    "ZERO_RESTART_COUNT",
    "ZERO_SHARED_MEMORY",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "PMI_RANK",
    "PMI_SIZE",
    "PMI_LOCAL_RANK",
    "PMI_LOCAL_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "I_MPI_HYDRA_UUID",
    "PALS_APID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMIX_NAMESPACE",
    "PMIX_RANK",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
];

/// What is never shown.
const SECRETS: &[&str] = &["ZERO_JOB_TOKEN"];

/// How many characters of a value an error shows: a list of nodes can be of any length.
const SHOWN: usize = 200;

/// The variables that are set, by name.
pub(super) struct Variables {
    values: Vec<(&'static str, String)>,
}

impl Variables {
    /// Looks every variable up.
    pub(super) fn read(lookup: impl Fn(&str) -> Option<OsString>) -> Result<Self, EnvironmentError> {
        let mut values = Vec::new();
        let mut garbled = None;
        for &name in NAMES {
            let Some(value) = lookup(name) else { continue };
            if value.to_str().is_none() {
                garbled = Some(name);
            }
            values.push((name, value.to_string_lossy().into_owned()));
        }
        let variables = Self { values };
        match garbled {
            Some(name) => Err(variables.malformed(name, "valid Unicode")),
            None => Ok(variables),
        }
    }

    /// The value of `name`, if it is set.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        debug_assert!(NAMES.contains(&name), "{name} must be listed to be looked up");
        self.values.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_str())
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.get(name).is_some()
    }

    /// The first of `names` that is set.
    pub(super) fn first(&self, names: &[&'static str]) -> Option<&'static str> {
        names.iter().copied().find(|name| self.has(name))
    }

    /// The text in `name`, which may not be empty.
    pub(super) fn text(&self, name: &'static str) -> Result<Option<&str>, EnvironmentError> {
        match self.get(name) {
            Some("") => Err(self.malformed(name, "a text that is not empty")),
            value => Ok(value),
        }
    }

    /// The number in `name`: digits alone, and not too large for `T`.
    pub(super) fn number<T: FromStr>(
        &self,
        name: &'static str,
        expected: &str,
    ) -> Result<Option<T>, EnvironmentError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        // `parse` would take a sign.
        let digits = value.bytes().all(|byte| byte.is_ascii_digit());
        match value.parse() {
            Ok(number) if digits => Ok(Some(number)),
            _ => Err(self.malformed(name, expected)),
        }
    }

    /// The error for `name`, whose value is not `expected`.
    pub(super) fn malformed(&self, name: &'static str, expected: impl Into<String>) -> EnvironmentError {
        let value = shown(name, self.get(name).unwrap_or_default());
        EnvironmentError::Malformed { name, value, expected: expected.into(), found: self.found() }
    }

    /// The error for `missing` variables.
    pub(super) fn partial(&self, missing: Vec<&'static str>) -> EnvironmentError {
        EnvironmentError::Partial { missing, found: self.found() }
    }

    /// The error for two variables that cannot both be right.
    pub(super) fn contradiction(&self, conflict: String) -> EnvironmentError {
        EnvironmentError::Contradiction { conflict, found: self.found() }
    }

    /// All that is set, fit to be shown.
    pub(super) fn found(&self) -> FoundVariables {
        FoundVariables(self.values.iter().map(|(name, value)| (*name, shown(name, value))).collect())
    }
}

/// A value as errors show it.
fn shown(name: &str, value: &str) -> String {
    if SECRETS.contains(&name) {
        return "<hidden>".to_owned();
    }
    match value.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}...", &value[..end]),
        None => format!("{value:?}"),
    }
}
