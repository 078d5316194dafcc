//! The workspace as cargo sees it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;
use xshell::{Shell, cmd};

/// The members of the workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
    pub(crate) workspace_root: PathBuf,
}

/// A member.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) manifest_path: PathBuf,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) targets: Vec<Target>,
    #[serde(default)]
    pub(crate) features: BTreeMap<String, Vec<String>>,
}

/// What a member depends on, directly.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    /// `dev`, `build`, or nothing for a normal one.
    pub(crate) kind: Option<String>,
}

/// What is built from a member.
#[derive(Debug, Deserialize)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: Vec<String>,
    #[serde(default, rename = "required-features")]
    pub(crate) required_features: Vec<String>,
}

impl Workspace {
    pub(crate) fn load(sh: &Shell) -> anyhow::Result<Self> {
        let json = cmd!(sh, "cargo metadata --no-deps --format-version 1").quiet().read()?;
        serde_json::from_str(&json).context("cargo's metadata has another form than expected")
    }

    /// The folder of a member, relative to the root, with `/` between its parts.
    pub(crate) fn folder(&self, package: &Package) -> String {
        let folder = package.manifest_path.parent().unwrap_or(&package.manifest_path);
        let relative = folder.strip_prefix(&self.workspace_root).unwrap_or(folder);
        slashed(relative)
    }
}

impl Package {
    pub(crate) fn is_library(&self) -> bool {
        self.targets.iter().any(|target| target.kind.iter().any(|kind| kind == "lib" || kind == "proc-macro"))
    }

    pub(crate) fn has_test(&self, name: &str) -> bool {
        let mut tests = self.targets.iter().filter(|target| target.kind.iter().any(|kind| kind == "test"));
        tests.any(|target| target.name == name)
    }

    pub(crate) fn benches(&self) -> impl Iterator<Item = &Target> {
        self.targets.iter().filter(|target| target.kind.iter().any(|kind| kind == "bench"))
    }
}

fn slashed(path: &Path) -> String {
    path.iter().map(|part| part.to_string_lossy()).collect::<Vec<_>>().join("/")
}
