//! Safetensors files, well formed and otherwise, through the reader.

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use tempfile::TempDir;
use zero_checkpoint::{CheckpointError, WeightsFile};
use zero_core::DType;

/// A file's bytes as the safetensors crate writes them.
fn serialized(tensors: &[(&str, Dtype, &[usize], &[u8])]) -> Vec<u8> {
    let views = tensors.iter().map(|&(name, dtype, shape, data)| {
        (name, TensorView::new(dtype, shape.to_vec(), data).expect("the test's own tensor"))
    });
    safetensors::serialize(views, None).expect("the test's own file")
}

fn le_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Two f32 tensors, an empty one and a scalar among others.
fn example() -> Vec<u8> {
    let matrix = le_bytes(&[1.0, -2.0, 3.5, f32::MIN_POSITIVE, 0.0, -0.0]);
    let tokens: Vec<u8> = [7i32, -1, i32::MAX].iter().flat_map(|value| value.to_le_bytes()).collect();
    serialized(&[
        ("layers.0.weight", Dtype::F32, &[2, 3], &matrix),
        ("layers.0.bias", Dtype::F32, &[0], &[]),
        ("scale", Dtype::F32, &[], &0.5f32.to_le_bytes()),
        ("tokens", Dtype::I32, &[3], &tokens),
        ("half", Dtype::BF16, &[1], &[0x80, 0x3F]),
        ("mask", Dtype::BOOL, &[2], &[0, 1]),
    ])
}

/// A file in a folder that lives as long as the first value.
fn written(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = TempDir::new().expect("a temporary folder");
    let path = folder.path().join("model.safetensors");
    fs::write(&path, bytes).expect("a file in it");
    (folder, path)
}

fn opened(bytes: &[u8]) -> Result<WeightsFile, CheckpointError> {
    // Only the handle is needed once a file is open.
    let (_folder, path) = written(bytes);
    WeightsFile::open(path)
}

/// A file with this header, its length in front of it, and `data` zero bytes after it.
fn with_header(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[test]
fn names_are_sorted_and_infos_are_as_written() {
    let file = opened(&example()).unwrap();
    let names: Vec<_> = file.names().collect();
    assert_eq!(names, ["half", "layers.0.bias", "layers.0.weight", "mask", "scale", "tokens"]);

    let weight = file.info("layers.0.weight").unwrap();
    assert_eq!((weight.dtype, &weight.shape[..], weight.numel()), (DType::F32, &[2, 3][..], 6));
    assert_eq!(file.info("half").unwrap().dtype, DType::BF16);
    assert_eq!(file.info("tokens").unwrap().dtype, DType::I32);
}

#[test]
fn values_come_back_bit_for_bit() {
    let file = opened(&example()).unwrap();
    let bits: Vec<u32> = file.read_f32("layers.0.weight").unwrap().iter().map(|v| v.to_bits()).collect();
    assert_eq!(bits, [1.0, -2.0, 3.5, f32::MIN_POSITIVE, 0.0, -0.0].map(f32::to_bits));
    assert_eq!(file.read_i32("tokens").unwrap(), [7, -1, i32::MAX]);
}

#[test]
fn an_empty_tensor_and_a_scalar_are_tensors() {
    let file = opened(&example()).unwrap();
    assert_eq!(file.info("layers.0.bias").unwrap().numel(), 0);
    assert!(file.read_f32("layers.0.bias").unwrap().is_empty());
    assert_eq!(file.info("scale").unwrap().numel(), 1);
    assert_eq!(file.read_f32("scale").unwrap(), [0.5]);
}

#[test]
fn a_file_without_tensors_opens_and_knows_no_name() {
    let file = opened(&serialized(&[])).unwrap();
    assert_eq!(file.names().len(), 0);
    let error = file.info("weight").unwrap_err();
    assert!(error.to_string().ends_with("has no tensor 'weight'; it has no tensors at all"), "{error}");
}

#[test]
fn a_range_that_is_not_within_the_tensor_is_an_error() {
    let file = opened(&example()).unwrap();
    #[expect(clippy::reversed_empty_ranges, reason = "it is what is tested")]
    let ranges = [4..7, 6..8, 7..7, 4..3, 0..usize::MAX, usize::MAX..usize::MAX];
    for range in ranges {
        let error = file.read_f32_range("layers.0.weight", range.clone()).unwrap_err();
        assert!(matches!(&error, CheckpointError::OutOfBounds { numel: 6, range: r, .. } if *r == range));
        assert!(error.to_string().contains("but it has 6; check the partition"), "{error}");
    }
}

#[test]
fn an_unknown_name_is_answered_with_the_nearest() {
    let file = opened(&example()).unwrap();
    match file.read_f32("layer.0.weights").unwrap_err() {
        CheckpointError::UnknownTensor { name, nearest, .. } => {
            assert_eq!((name.as_str(), nearest[0].as_str()), ("layer.0.weights", "layers.0.weight"));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn another_type_than_asked_for_is_an_error_that_names_both() {
    let file = opened(&example()).unwrap();
    for error in [file.read_f32("tokens").unwrap_err(), file.read_f32_range("tokens", 0..1).unwrap_err()] {
        assert!(error.to_string().contains("holds i32, not f32"), "{error}");
    }
    let error = file.read_i32("scale").unwrap_err();
    assert!(error.to_string().contains("holds f32, not i32"), "{error}");
}

#[test]
fn an_unsupported_type_spoils_its_own_tensor_only() {
    let file = opened(&example()).unwrap();
    let error = file.info("mask").unwrap_err();
    assert!(matches!(&error, CheckpointError::UnsupportedDType { dtype, .. } if dtype == "BOOL"), "{error}");
    assert_eq!(file.read_f32("scale").unwrap(), [0.5]);
}

#[test]
fn a_file_that_is_not_there_is_an_error_with_the_path_and_the_cause() {
    let folder = TempDir::new().unwrap();
    for (path, kind) in [
        (folder.path().join("absent.safetensors"), std::io::ErrorKind::NotFound),
        (folder.path().to_path_buf(), std::io::ErrorKind::IsADirectory),
    ] {
        let error = WeightsFile::open(&path).unwrap_err();
        assert!(error.to_string().contains(&path.display().to_string()), "{error}");
        let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
        assert_eq!(source.map(std::io::Error::kind), Some(kind));
    }
}

#[test]
fn every_truncation_is_an_error_that_says_so() {
    let bytes = example();
    for len in 0..bytes.len() {
        match opened(&bytes[..len]) {
            Err(CheckpointError::Truncated { expected, found, .. }) => {
                assert_eq!(found, len as u64);
                assert!(expected > found && expected <= bytes.len() as u64, "{expected} for {found}");
            }
            other => panic!("{len} bytes: {other:?}"),
        }
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_an_error() {
    let (_folder, path) = written(&example());
    let file = WeightsFile::open(&path).unwrap();
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(100).unwrap();
    assert!(matches!(file.read_f32("scale"), Err(CheckpointError::Read { .. })));
}

#[test]
fn bytes_after_the_last_tensor_are_an_error() {
    let mut bytes = example();
    bytes.extend([0; 3]);
    let error = opened(&bytes).unwrap_err();
    assert!(error.to_string().contains("3 bytes follow the last tensor"), "{error}");
}

#[test]
fn a_huge_header_length_is_refused_before_anything_is_allocated() {
    for length in [u64::MAX, u64::MAX - 7, 1 << 60, 100_000_001] {
        let mut bytes = example();
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        assert!(matches!(opened(&bytes), Err(CheckpointError::Malformed { .. })), "{length}");
    }
    // Allowed by the format, but beyond the end of this file.
    let mut bytes = example();
    bytes[..8].copy_from_slice(&100_000_000u64.to_le_bytes());
    assert!(matches!(opened(&bytes), Err(CheckpointError::Truncated { expected: 100_000_008, .. })));
}

#[test]
fn a_header_that_contradicts_itself_is_malformed() {
    let max = usize::MAX;
    for (what, header) in [
        ("not JSON", "{".to_owned()),
        ("no object", "[]".to_owned()),
        ("no bytes at all", String::new()),
        ("a missing field", r#"{"a":{"dtype":"F32","shape":[1]}}"#.to_owned()),
        ("an unknown type", r#"{"a":{"dtype":"F31","shape":[1],"data_offsets":[0,4]}}"#.to_owned()),
        ("a negative dim", r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}"#.to_owned()),
        ("a shape of another size", r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#.to_owned()),
        ("offsets in reverse", r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#.to_owned()),
        ("a gap", r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#.to_owned()),
        (
            "an overlap",
            r#"{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}"#
                .to_owned(),
        ),
        ("a product that overflows", format!(r#"{{"a":{{"dtype":"F32","shape":[{max},2],"data_offsets":[0,4]}}}}"#)),
        ("more than any file", format!(r#"{{"a":{{"dtype":"U8","shape":[{max}],"data_offsets":[0,{max}]}}}}"#)),
    ] {
        match opened(&with_header(&header, 4)) {
            Err(CheckpointError::Malformed { .. }) => {}
            // The last one adds up, and is rightly said to be longer than the file.
            Err(CheckpointError::Truncated { .. }) if what == "more than any file" => {}
            other => panic!("{what}: {other:?}"),
        }
    }
}

#[test]
fn threads_read_through_one_handle() {
    let values: Vec<f32> = (0..4096).map(|index| index as f32).collect();
    let file = opened(&serialized(&[("w", Dtype::F32, &[4096], &le_bytes(&values))])).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (file, values) = (&file, &values);
            scope.spawn(move || {
                for start in (thread..4000).step_by(7) {
                    assert_eq!(
                        file.read_f32_range("w", start..start + 96).unwrap(),
                        values[start..start + 96]
                    );
                }
            });
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_range_is_that_part_of_the_whole(len in 0usize..50, a in 0usize..50, b in 0usize..50) {
        let values: Vec<f32> = (0..len).map(|index| index as f32 - 0.5).collect();
        let bytes = le_bytes(&values);
        let file = opened(&serialized(&[
            ("before", Dtype::U8, &[3], &[1, 2, 3]),
            ("w", Dtype::F32, &[len], &bytes),
        ])).unwrap();
        let (start, end) = (a.min(b).min(len), a.max(b).min(len));
        prop_assert_eq!(file.read_f32_range("w", start..end).unwrap(), &values[start..end]);
    }

    #[test]
    fn an_altered_byte_never_panics_and_never_reads_beyond_the_file(at in 0usize..500, to: u8) {
        let mut bytes = example();
        let at = at % bytes.len();
        bytes[at] = to;
        if let Ok(file) = opened(&bytes) {
            for name in file.names() {
                if let Ok(values) = file.read_f32(name) {
                    prop_assert!(values.len() * size_of::<f32>() <= bytes.len());
                }
            }
        }
    }
}

#[cfg(unix)]
#[test]
fn what_is_no_regular_file_is_refused_before_it_is_opened() {
    let error = WeightsFile::open("/dev/null").expect_err("it is a device");
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(format!("{error} {source}").contains("not a regular file"), "{error}: {source}");
}
