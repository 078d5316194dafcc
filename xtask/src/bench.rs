//! `cargo xtask bench`: finds a benchmark, runs it, judges its rows.
//!
//! A benchmark is a `[[bench]]` target with `harness = false` of any member. It is run with `--rows FILE` (and
//! cargo's own `--bench`), prints what it likes, and writes to FILE a JSON list of rows:
//! `{"name": "...", "value": 1.5, "unit": "x", "bar": 1.2, "pass": true}`, where `value`, `bar` and `pass` may
//! be null. With `--device`, it is built with the feature of that name and finds the name in `ZERO_DEVICE`. One that
//! requires the feature `cube` runs on such devices alone: without `--device`, on those of wgpu.

use std::path::{Path, PathBuf, absolute};
use std::process::ExitCode;

use anyhow::{Context, bail, ensure};
use xshell::Shell;

use crate::device::{Devices, Kind};
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

    /// Runs it on a device of this kind; where there is none, says so and measures nothing.
    #[arg(long)]
    device: Option<Kind>,

    /// Fails where there is no such device.
    #[arg(long, requires = "device")]
    require: bool,

    /// Lists the benchmarks there are.
    #[arg(long, conflicts_with_all = ["name", "json", "device"])]
    list: bool,
}

pub(crate) fn run(sh: &Shell, options: &Options) -> anyhow::Result<ExitCode> {
    let workspace = Workspace::load(sh)?;
    match &options.name {
        Some(name) => {
            let (package, target) = find(&workspace, name)?;
            let device = options.device.or_else(|| default_device(target));
            let features = features(package, target, device)?;
            let json = options.json.as_deref();
            if let Some(kind) = device {
                if let Some(absence) = Devices::find(sh, kind)?.absence(kind) {
                    return skip(sh, &absence, json, options.require);
                }
            }
            measure(sh, (package, target), &features, device, json)
        }
        None => {
            for (package, target) in benches(&workspace) {
                println!("{} ({})", target.name, package.name);
            }
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// What a benchmark that needs a device runs on if none is asked for: most machines have a driver for wgpu.
fn default_device(target: &Target) -> Option<Kind> {
    target.required_features.iter().any(|feature| feature == "cube").then_some(Kind::Wgpu)
}

/// What the benchmark is built with.
fn features<'a>(package: &Package, target: &'a Target, device: Option<Kind>) -> anyhow::Result<Vec<&'a str>> {
    let mut features: Vec<&str> = target.required_features.iter().map(String::as_str).collect();
    if let Some(kind) = device {
        let (bench, package, kind) = (&target.name, package, kind.name());
        ensure!(
            package.features.contains_key(kind),
            "benchmark '{bench}' runs on no device: {} has no feature '{kind}'",
            package.name
        );
        features.push(kind);
    }
    Ok(features)
}

/// Says why nothing is measured. Whoever reads the file finds no rows in it.
fn skip(sh: &Shell, why: &str, json: Option<&Path>, require: bool) -> anyhow::Result<ExitCode> {
    ensure!(!require, "{why}");
    println!("skipped: {why}");
    if let Some(json) = json {
        sh.write_file(absolute(json)?, "[]\n")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn measure(
    sh: &Shell,
    (package, target): (&Package, &Target),
    features: &[&str],
    device: Option<Kind>,
    json: Option<&Path>,
) -> anyhow::Result<ExitCode> {
    // A relative path is relative to where the task was called, which is not where the shell is.
    let json = json.map(absolute).transpose()?;
    let folder = sh.create_temp_dir()?;
    let file = folder.path().join("rows.json");
    let mut command = sh.cmd("cargo").args(["bench", "-p", &package.name, "--bench", &target.name]);
    if !features.is_empty() {
        command = command.arg("--features").arg(features.join(","));
    }
    if let Some(kind) = device {
        command = command.env("ZERO_DEVICE", kind.name());
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
    use super::{Kind, Workspace, benches, default_device, features, find};

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
    fn a_benchmark_runs_on_devices_that_its_package_knows() {
        let mut workspace = workspace(&[("zero-burn", "step")]);
        let built = |workspace: &Workspace, device| {
            let (package, target) = find(workspace, "step").unwrap();
            features(package, target, device).map(|features| features.join(","))
        };
        assert_eq!(built(&workspace, None).unwrap(), "fast");
        let error = built(&workspace, Some(Kind::Cuda)).unwrap_err().to_string();
        assert_eq!(error, "benchmark 'step' runs on no device: zero-burn has no feature 'cuda'");
        workspace.packages[0].features.insert("cuda".to_owned(), Vec::new());
        assert_eq!(built(&workspace, Some(Kind::Cuda)).unwrap(), "fast,cuda");
    }

    #[test]
    fn a_benchmark_of_devices_finds_one_unasked() {
        let mut workspace = workspace(&[("zero-burn", "kernels")]);
        assert_eq!(default_device(find(&workspace, "kernels").unwrap().1), None);
        let required = &mut workspace.packages[0].targets[1].required_features;
        required.push("cube".to_owned());
        assert_eq!(default_device(find(&workspace, "kernels").unwrap().1), Some(Kind::Wgpu));
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
