//! The kinds of devices that tests and benchmarks run on, and which of them this machine has.

use std::path::Path;

use anyhow::Context;
use clap::ValueEnum;
use serde::Deserialize;
use xshell::Shell;

/// A runtime of Burn's CubeCL backend; its name is that of the feature and the value of `ZERO_DEVICE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Kind {
    Cuda,
    Rocm,
    Wgpu,
    Vulkan,
    Metal,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
            Self::Metal => "metal",
        }
    }

    /// Why this machine cannot have such a device, as far as that shows without a build: the first build for CUDA
    /// downloads a compiler, the one for ROCm needs its libraries.
    fn excluded(self) -> Option<&'static str> {
        match self {
            Self::Rocm if !Path::new("/dev/kfd").exists() => Some("there is no AMD driver: no /dev/kfd"),
            Self::Metal if !cfg!(target_os = "macos") => Some("only macOS has Metal"),
            _ => None,
        }
    }

    /// The program of ours that lists such devices. That for CUDA asks the driver alone.
    const fn lister(self) -> [&'static str; 6] {
        match self {
            Self::Cuda => ["-p", "zero-comm", "--features", "nccl", "--example", "cuda_devices"],
            _ => ["-p", "zero-burn", "--features", self.name(), "--example", "devices"],
        }
    }
}

/// What this machine has of a kind.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Devices {
    /// Their names, in their order.
    pub(crate) names: Vec<String>,
    /// What is missing, and why.
    pub(crate) missing: Vec<(String, String)>,
}

impl Devices {
    /// Asks for the devices of a kind; that there is none is no error.
    pub(crate) fn find(sh: &Shell, kind: Kind) -> anyhow::Result<Self> {
        if let Some(why) = kind.excluded() {
            return Ok(Self { names: Vec::new(), missing: vec![(kind.name().to_owned(), why.to_owned())] });
        }
        let listed = sh.cmd("cargo").args(["run", "--quiet"]).args(kind.lister()).read()?;
        Self::parse(kind, &listed)
    }

    /// `listed` has one JSON object a line: `{"kind": "cuda", "name": "..."}` or `{"missing": "nccl", "why": "..."}`.
    fn parse(kind: Kind, listed: &str) -> anyhow::Result<Self> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Line {
            Device { kind: String, name: String },
            Missing { missing: String, why: String },
        }
        let mut devices = Self::default();
        for line in listed.lines() {
            match serde_json::from_str(line).with_context(|| format!("no list of devices: {line}"))? {
                Line::Device { kind: of, name } if of == kind.name() => devices.names.push(name),
                Line::Device { .. } => {}
                Line::Missing { missing, why } => devices.missing.push((missing, why)),
            }
        }
        Ok(devices)
    }

    /// Why there is no `what`, if there is none.
    pub(crate) fn missing(&self, what: &str) -> Option<&str> {
        self.missing.iter().find(|(missing, _)| missing == what).map(|(_, why)| why.as_str())
    }

    /// Why nothing can run on this kind.
    pub(crate) fn absence(&self, kind: Kind) -> Option<String> {
        let nothing = || self.missing(kind.name()).unwrap_or("nothing answers").to_owned();
        self.names.is_empty().then(|| format!("no {} device: {}", kind.name(), nothing()))
    }

    /// Whether they are all drawn by the host's own cores.
    pub(crate) fn are_software(&self) -> bool {
        let software = |name: &String| {
            let name = name.to_lowercase();
            ["llvmpipe", "lavapipe", "swiftshader", "basic render"].iter().any(|part| name.contains(part))
        };
        self.names.iter().all(software)
    }
}

#[cfg(test)]
mod tests {
    use super::{Devices, Kind};

    fn named(names: &[&str]) -> Devices {
        Devices { names: names.iter().map(|&name| name.to_owned()).collect(), missing: Vec::new() }
    }

    #[test]
    fn devices_of_the_kind_count_and_no_other() {
        let listed = r#"{"kind":"wgpu","name":"llvmpipe"}
{"kind":"vulkan","name":"llvmpipe"}
{"kind":"vulkan","name":"A GPU"}"#;
        assert_eq!(Devices::parse(Kind::Vulkan, listed).unwrap(), named(&["llvmpipe", "A GPU"]));
        assert_eq!(Devices::parse(Kind::Metal, listed).unwrap(), named(&[]));
    }

    #[test]
    fn what_is_missing_is_told_with_its_cause() {
        let listed = r#"{"kind":"cuda","name":"A GPU"}
{"missing":"nccl","why":"no libnccl.so.2"}"#;
        let devices = Devices::parse(Kind::Cuda, listed).unwrap();
        assert_eq!(devices.absence(Kind::Cuda), None);
        assert_eq!(devices.missing("nccl"), Some("no libnccl.so.2"));
        assert_eq!(devices.missing("cuda"), None);
    }

    #[test]
    fn no_device_is_an_answer() {
        let devices = Devices::parse(Kind::Cuda, r#"{"missing":"cuda","why":"no driver"}"#).unwrap();
        assert_eq!(devices.absence(Kind::Cuda).as_deref(), Some("no cuda device: no driver"));
        let devices = Devices::parse(Kind::Wgpu, "").unwrap();
        assert_eq!(devices.absence(Kind::Wgpu).as_deref(), Some("no wgpu device: nothing answers"));
    }

    #[test]
    fn another_answer_is_an_error() {
        let error = Devices::parse(Kind::Wgpu, "warning: deprecated").unwrap_err();
        assert_eq!(error.to_string(), "no list of devices: warning: deprecated");
    }

    #[test]
    fn software_is_known_by_its_name() {
        assert!(named(&["llvmpipe (LLVM 15.0.7, 256 bits)"]).are_software());
        assert!(!named(&["llvmpipe (LLVM 15.0.7, 256 bits)", "NVIDIA H100"]).are_software());
    }
}
