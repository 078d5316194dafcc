//! `cargo xtask lint`: the project's own rules, as code.

mod arrows;
mod layout;
mod manifest;
mod source;

use std::fmt;

use anyhow::ensure;
use xshell::{Shell, cmd};

use crate::workspace::Workspace;

/// Where a rule is broken, and how.
#[derive(Debug, PartialEq, Eq)]
struct Problem {
    place: String,
    what: String,
}

impl Problem {
    fn new(place: impl Into<String>, what: impl Into<String>) -> Self {
        Self { place: place.into(), what: what.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.place, self.what)
    }
}

/// Checks every rule and prints each breach; an error if there is any.
pub(crate) fn run(sh: &Shell) -> anyhow::Result<()> {
    let workspace = Workspace::load(sh)?;
    // What is about to be added counts; what is ignored does not.
    let listed = cmd!(sh, "git ls-files --cached --others --exclude-standard").quiet().read()?;
    // A file that is deleted but still in the index is not there to be checked.
    let files: Vec<&str> = listed.lines().filter(|file| sh.path_exists(file)).collect();

    let mut problems = layout::check(&files);
    problems.extend(arrows::check(&workspace));
    for package in &workspace.packages {
        let path = format!("{}/Cargo.toml", workspace.folder(package));
        problems.extend(manifest::check(&path, &sh.read_file(&path)?));
    }
    let libraries: Vec<String> = workspace
        .packages
        .iter()
        .filter(|package| package.is_library())
        .map(|package| workspace.folder(package) + "/")
        .collect();
    for file in files.iter().filter(|file| file.ends_with(".rs")) {
        let in_library = libraries.iter().any(|folder| file.starts_with(folder));
        problems.extend(source::check(file, &sh.read_file(file)?, in_library));
    }

    for problem in &problems {
        println!("{problem}");
    }
    ensure!(problems.is_empty(), "{} rules are broken", problems.len());
    Ok(())
}
