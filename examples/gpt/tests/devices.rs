//! The binary on the kind of device that `ZERO_DEVICE` names, or on one that is not built in.

mod common;

use common::{folder, gpt};
#[cfg(any(feature = "cuda", feature = "rocm", feature = "wgpu", feature = "vulkan", feature = "metal"))]
use common::{losses, train};

#[test]
#[cfg(any(feature = "cuda", feature = "rocm", feature = "wgpu", feature = "vulkan", feature = "metal"))]
fn a_device_trains_sharded_as_burn_alone_does_on_it() {
    let kind = std::env::var("ZERO_DEVICE").unwrap_or_else(|_| String::from("wgpu"));
    let folder = folder();
    let on_device = ["--device", &kind];
    let (plain, _) = train(&folder, &[&on_device[..], &["--plain"]].concat());
    let reference = losses(&plain);
    for more in [&["--ranks", "1"][..], &["--ranks", "2"], &["--ranks", "2", "--offload", "optimizer=host"]] {
        let (metrics, printed) = train(&folder, &[&on_device[..], more].concat());
        assert!(printed.contains(&format!(" on {kind}, ")), "{printed}");
        assert_eq!(metrics.len(), reference.len());
        for (loss, expected) in losses(&metrics).iter().zip(&reference) {
            assert!((loss - expected).abs() < 1e-3 * expected, "{more:?}: {metrics:?} and {reference:?}");
        }
    }
}

#[test]
#[cfg(not(feature = "metal"))]
fn a_device_that_is_not_built_in_is_refused_with_its_feature() {
    let folder = folder();
    let output = gpt(folder.path(), &["--device", "metal", "--corpus", "text.txt"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("feature `metal`"), "{error}");
}

#[test]
fn a_kind_of_device_that_nobody_knows_is_refused_with_all_kinds() {
    let folder = folder();
    let output = gpt(folder.path(), &["--device", "gpu"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("flex, cuda, rocm"), "{error}");
}
