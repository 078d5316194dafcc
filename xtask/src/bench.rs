//! `cargo xtask bench`: finds a benchmark, runs it, judges its rows.
//!
//! A benchmark is a `[[bench]]` target with `harness = false` of any member. It is run with `--rows FILE` (and
//! cargo's own `--bench`), prints what it likes, and writes to FILE a JSON list of rows:
//! `{"name": "...", "value": 1.5, "unit": "x", "bar": 1.2, "pass": true}`, where `value`, `bar` and `pass` may
//! be null.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use xshell::Shell;

use crate::nearest::nearest_first;
use crate::row;
use crate::workspace::{Package, Target, Workspace};

#[derive(clap::Args)]
pub(crate) struct Options {
    /// The benchmark.
    #[arg(required_unless_present = "list")]
    name: Option<String>,

    /// Writes the rows to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,

    /// Lists the benchmarks there are.
    #[arg(long, conflicts_with_all = ["name", "json"])]
    list: bool,
}

pub(crate) fn run(sh: &Shell, options: &Options) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::load(sh)?;
    match &options.name {
        Some(name) => {
            let (package, target) = find(&workspace, name)?;
            measure(sh, package, target, options.json.as_deref())
        }
        None => {
            for (package, target) in benches(&workspace) {
                println!("{} ({})", target.name, package.name);
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn measure(
    sh: &Shell,
    package: &Package,
    target: &Target,
    json: Option<&std::path::Path>,
) -> anyhow::Result<ExitCode> {
    // A relative path is relative to where the task was called, which is not where the shell is.
    let json = json.map(std::path::absolute).transpose()?;
    let folder = sh.create_temp_dir()?;
    let file = folder.path().join("rows.json");
    let mut command = sh.cmd("cargo").args(["bench", "-p", &package.name, "--bench", &target.name]);
    if !target.required_features.is_empty() {
        command = command.arg("--features").arg(target.required_features.join(","));
    }
    command.args(["--", "--rows"]).arg(&file).run()?;

    let rows = sh.read_file(&file).with_context(|| format!("benchmark '{}' wrote no rows", target.name))?;
    let rows = row::parse(&rows).with_context(|| format!("benchmark '{}'", target.name))?;
    print!("{}", row::table(&rows));
    if let Some(json) = json {
        sh.write_file(json, serde_json::to_string_pretty(&rows)? + "\n")?;
    }
    let failed = rows.iter().any(|row| row.pass == Some(false));
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn benches(workspace: &Workspace) -> impl Iterator<Item = (&Package, &Target)> {
    workspace.packages.iter().flat_map(|package| package.benches().map(move |target| (package, target)))
}

fn find<'a>(workspace: &'a Workspace, name: &str) -> anyhow::Result<(&'a Package, &'a Target)> {
    let found: Vec<_> = benches(workspace).filter(|(_, target)| target.name == name).collect();
    match found[..] {
        [only] => Ok(only),
        [] => {
            let known = nearest_first(name, benches(workspace).map(|(_, target)| target.name.as_str()));
            if known.is_empty() {
                bail!("no benchmark '{name}': the workspace has none");
            }
            bail!("no benchmark '{name}'; there are: {}", known.join(", "))
        }
        [(first, _), (second, _), ..] => {
            bail!("benchmark '{name}' is in {} and in {}: rename one", first.name, second.name)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Workspace, benches, find};

    fn workspace(benches: &[(&str, &str)]) -> Workspace {
        let packages: Vec<_> = benches
            .iter()
            .map(|(package, bench)| {
                serde_json::json!({
                    "name": package, "manifest_path": format!("/w/{package}/Cargo.toml"), "dependencies": [],
                    "targets": [
                        {"name": package, "kind": ["lib"]},
                        {"name": bench, "kind": ["bench"], "required-features": ["fast"]},
                    ],
                })
            })
            .collect();
        serde_json::from_value(serde_json::json!({"packages": packages, "workspace_root": "/w"})).unwrap()
    }

    #[test]
    fn a_benchmark_is_found_in_its_package() {
        let workspace = workspace(&[("zero-comm", "gather"), ("zero-burn", "step")]);
        let (package, target) = find(&workspace, "step").unwrap();
        assert_eq!(
            (&*package.name, &*target.name, &*target.required_features[0]),
            ("zero-burn", "step", "fast")
        );
        assert_eq!(benches(&workspace).count(), 2);
    }

    #[test]
    fn an_unknown_name_is_answered_with_the_known_ones_nearest_first() {
        let workspace = workspace(&[("zero-comm", "gather"), ("zero-burn", "step"), ("gpt", "train")]);
        let error = find(&workspace, "stop").unwrap_err().to_string();
        assert_eq!(error, "no benchmark 'stop'; there are: step, gather, train");
    }

    #[test]
    fn without_benchmarks_the_error_says_so() {
        let error = find(&workspace(&[]), "step").unwrap_err().to_string();
        assert_eq!(error, "no benchmark 'step': the workspace has none");
    }

    #[test]
    fn one_name_in_two_packages_is_an_error() {
        let workspace = workspace(&[("zero-comm", "speed"), ("zero-burn", "speed")]);
        let error = find(&workspace, "speed").unwrap_err().to_string();
        assert_eq!(error, "benchmark 'speed' is in zero-comm and in zero-burn: rename one");
    }
}
