//! Checkpoints that are not what was saved.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::{blank, load, model, ranks, save, spec, wanted, whole};
use proptest::prelude::*;
use tempfile::TempDir;
use zero_checkpoint::{
    Checkpoint, CheckpointError, Digest, FileRecord, LoadOptions, LocalStorage, Manifest, MemoryStorage,
    Solo, Storage, verify,
};
use zero_core::{Rank, Stage, WorldSize};

struct Saved {
    folder: TempDir,
    storage: Arc<dyn Storage>,
}

impl Saved {
    fn new(world: usize) -> Self {
        let folder = TempDir::new().unwrap();
        let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path()));
        save(&storage, &model(1), 1, Stage::Three, world);
        Self { folder, storage }
    }

    fn checkpoint(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open_latest(Arc::clone(&self.storage))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("step-0000000001").join(name)
    }

    /// All that is found to be wrong, in words.
    fn problems(&self) -> String {
        problems(&self.storage)
    }
}

/// Changes a file, looks, and restores it.
fn with(path: &Path, content: &[u8], look: impl FnOnce()) {
    let before = fs::read(path).unwrap();
    fs::write(path, content).unwrap();
    look();
    fs::write(path, before).unwrap();
}

/// All that is found to be wrong with the newest checkpoint, in words.
fn problems(storage: &Arc<dyn Storage>) -> String {
    match Checkpoint::open_latest(Arc::clone(storage)) {
        Err(error) => error.to_string(),
        Ok(checkpoint) => {
            let problems = verify(&checkpoint, &mut |_| ()).unwrap();
            problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
        }
    }
}

#[test]
fn every_changed_byte_and_every_truncation_is_found_and_its_file_named() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save(&storage, &model(1), 1, Stage::Three, 2);
    let files = storage.list("step-0000000001").unwrap();
    let expected = ["manifest.json", "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors"];
    assert_eq!(files, expected);
    for name in files {
        let path = format!("step-0000000001/{name}");
        let put = |content: &[u8]| {
            let mut file = storage.create(&path, content.len() as u64).unwrap();
            file.write(content).unwrap();
            file.finish().unwrap();
        };
        let found = |what: String| {
            let problems = problems(&storage);
            assert!(problems.contains(&name), "{what} of {name}: {problems}");
        };
        let file = storage.open(&path).unwrap();
        let mut content = vec![0; file.bytes() as usize];
        file.read(0, &mut content).unwrap();
        for at in 0..content.len() {
            let mut changed = content.clone();
            // Another bit each time, so that letters become other letters too.
            changed[at] ^= 1 << (at % 8);
            put(&changed);
            found(format!("byte {at}"));
        }
        for length in 0..content.len() {
            put(&content[..length]);
            found(format!("{length} bytes"));
        }
        put(&[&content[..], b"\n"].concat());
        found("a byte more".to_owned());
        put(&content);
    }
    assert_eq!(problems(&storage), "");
}

#[test]
fn a_load_finds_what_is_damaged_of_what_it_reads_and_tells_all_ranks() {
    let saved = Saved::new(2);
    let path = saved.path("rank-00001-of-00002.safetensors");
    let mut content = fs::read(&path).unwrap();
    *content.last_mut().unwrap() ^= 1;
    fs::write(&path, content).unwrap();
    for world in [1, 3] {
        let errors = ranks(world, |group| {
            let checkpoint = saved.checkpoint().unwrap();
            load(&checkpoint, &model(1), Stage::Three, &group).unwrap_err().to_string()
        });
        for error in errors {
            assert!(error.contains("rank-00001-of-00002"), "{error}");
        }
    }
    fs::remove_file(&path).unwrap();
    let error = load(&saved.checkpoint().unwrap(), &model(1), Stage::Three, &Solo).unwrap_err();
    assert!(error.to_string().contains("cannot open") && error.to_string().contains("rank-00001"), "{error}");
}

#[test]
fn a_damaged_chunk_is_named_by_its_place() {
    let folder = TempDir::new().unwrap();
    let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path()));
    let model = [whole(spec("w", &[1 << 20]), 1)];
    save(&storage, &model, 1, Stage::Three, 1);
    let path = folder.path().join("step-0000000001/rank-00000-of-00001.safetensors");
    let mut content = fs::read(&path).unwrap();
    content[3 << 20] ^= 0x10;
    fs::write(&path, content).unwrap();
    let checkpoint = Checkpoint::open_latest(storage).unwrap();
    let problems = verify(&checkpoint, &mut |_| ()).unwrap();
    assert_eq!(problems.len(), 1);
    assert!(
        problems[0].to_string().contains("the 1048576 bytes at 3145728 are not what was saved"),
        "{}",
        problems[0]
    );
    // Elsewhere it can be read.
    let mut into = blank(&model);
    let wanted = wanted(&mut into, None, Stage::Three, Rank::new(1), WorldSize::new(8).unwrap());
    let options = LoadOptions { optimizer: false, ..LoadOptions::default() };
    checkpoint.load(wanted, &options, &Solo).unwrap();
}

/// A manifest's bytes with one thing replaced, and the hash that goes with it.
fn forged(manifest: &Manifest, from: &str, to: &str) -> Vec<u8> {
    let text = String::from_utf8(manifest.to_bytes()).unwrap();
    let body = text.rsplit_once(",\"hash\"").unwrap().0;
    assert!(body.contains(from), "{from}");
    let body = body.replacen(from, to, 1);
    let hash = zero_checkpoint::Digest::of(body.as_bytes());
    format!("{body},\"hash\":\"{hash}\"}}\n").into_bytes()
}

#[test]
fn manifests_that_make_no_sense_are_refused_with_the_reason() {
    let saved = Saved::new(2);
    let manifest = saved.checkpoint().unwrap().manifest().clone();
    let file = "rank-00000-of-00002.safetensors";
    for (from, to, reason) in [
        (file, "../rank.safetensors", "`../rank.safetensors` is no name of a file in the checkpoint"),
        (file, "/etc/passwd", "is no name of a file"),
        (file, "a/b", "is no name of a file"),
        (file, "..", "is no name of a file"),
        (file, ".hidden", "is no name of a file"),
        (file, "a\\\\b", "is no name of a file"),
        (file, "", "is no name of a file"),
        (file, "rank-00001-of-00002.safetensors", "is there twice"),
        ("\"zero-checkpoint\"", "\"other\"", "its format is `other`"),
        ("\"end\":57", "\"end\":58", "does not follow"),
        ("\"end\":57", "\"end\":56", "does not follow 56 of 114 elements"),
        ("\"start\":0", "\"start\":1", "does not follow 0"),
        ("\"file\":0", "\"file\":7", "a piece is in file 7, of 2"),
        ("\"offset\":", "\"offset\":1", "embedding.weight"),
        ("\"offset\":", "\"offset\":9999999", "lies outside of"),
        ("\"offset\":", "\"offset\":18446744073709551", "manifest"),
        ("\"chunk_bytes\":1048576", "\"chunk_bytes\":1048577", "no power of two"),
        ("\"chunk_bytes\":1048576", "\"chunk_bytes\":1", "no power of two"),
        ("\"bytes\":", "\"bytes\":10000000", "hashes for"),
        ("\"hash\":\"", "\"hash\":\"0", "32 lower-case"),
        ("\"size\":2", "\"size\":3", "its mesh is not one of 2 ranks"),
        ("\"size\":2", "\"size\":2,\"more\":0", "unknown field `more`"),
        ("\"name\":\"embedding.weight\"", "\"name\":\"scale\"", "the path `scale` is there twice"),
        ("\"name\":\"embedding.weight\"", "\"name\":\"\"", "has an empty path"),
        ("\"group\":\"decay\"", "\"group\":\"none\"", "in a group `none` that is not there"),
        ("\"first_moment\"", "\"first.moment\"", "has a state named `first.moment`"),
        ("\"step\":1", "\"step\":2", "in the folder of another step"),
        ("[19,6]", "[4294967296,4294967296,6]", "is too large"),
    ] {
        with(&saved.path("manifest.json"), &forged(&manifest, from, to), || {
            let error = saved.checkpoint().unwrap_err().to_string();
            assert!(error.contains(reason), "{from} -> {to}: {error}");
        });
    }
    let newer = forged(&manifest, "\"format_version\":1", "\"format_version\":2");
    with(&saved.path("manifest.json"), &newer, || {
        let error = saved.checkpoint().unwrap_err();
        assert!(matches!(error, CheckpointError::NewerVersion { found: 2, known: 1, .. }), "{error}");
    });
}

#[test]
fn a_link_is_no_file_of_a_checkpoint() {
    let saved = Saved::new(1);
    let path = saved.path("rank-00000-of-00001.safetensors");
    let elsewhere = saved.folder.path().join("elsewhere");
    fs::rename(&path, &elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
    assert!(saved.problems().contains("not a regular file"), "{}", saved.problems());
}

#[test]
fn a_header_that_says_something_else_is_found() {
    let saved = Saved::new(1);
    let path = saved.path("rank-00000-of-00001.safetensors");
    let before = fs::read(&path).unwrap();
    let text = String::from_utf8_lossy(&before[..2048]).into_owned();
    let at = text.find("model.tiny").unwrap();
    let mut content = before.clone();
    content[at..at + 10].copy_from_slice(b"model.tiny".map(|byte| byte.to_ascii_uppercase()).as_slice());
    // With hashes that go with it.
    let mut manifest = saved.checkpoint().unwrap().manifest().clone();
    manifest.files[0].chunks = vec![zero_checkpoint::Digest::of(&content)];
    manifest.files[0].hash = zero_checkpoint::Digest::of_chunks(&manifest.files[0].chunks);
    fs::write(&path, content).unwrap();
    fs::write(saved.path("manifest.json"), manifest.to_bytes()).unwrap();
    let problems = saved.problems();
    assert!(
        problems.contains("`model.tiny` in rank-00000-of-00001.safetensors: is in the manifest, but not"),
        "{problems}"
    );
    assert!(
        problems.contains("`MODEL.TINY` in rank-00000-of-00001.safetensors: is in the file, but not"),
        "{problems}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_no_manifest_and_no_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Manifest::from_bytes(&bytes, "manifest").is_err());
    }

    #[test]
    fn a_forged_manifest_is_refused_or_valid(at in 0usize..20_000, to in "[0-9a-z{}\\[\\],:\"]{0,6}") {
        let manifest = {
            let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
            save(&storage, &model(1), 1, Stage::Three, 1);
            Checkpoint::open_latest(storage).unwrap().manifest().clone()
        };
        let text = String::from_utf8(manifest.to_bytes()).unwrap();
        let body = text.rsplit_once(",\"hash\"").unwrap().0;
        let at = at % (body.len() - 6);
        let body = format!("{}{to}{}", &body[..at], &body[at + to.len()..]);
        let hash = zero_checkpoint::Digest::of(body.as_bytes());
        let forged = format!("{body},\"hash\":\"{hash}\"}}\n");
        if let Ok(manifest) = Manifest::from_bytes(forged.as_bytes(), "manifest") {
            // What was accepted is written and read back.
            let again = Manifest::from_bytes(&manifest.to_bytes(), "manifest").unwrap();
            prop_assert_eq!(again, manifest);
        }
    }
}

#[test]
fn a_header_of_tensors_beyond_any_file_is_named() {
    let storage: Arc<dyn Storage> = Arc::new(MemoryStorage::new());
    save(&storage, &[], 1, Stage::Three, 1);
    let mut manifest = Checkpoint::open(Arc::clone(&storage), 1).unwrap().manifest().clone();
    // Each as long as the format allows; the last one begins just before what eight bytes can tell.
    let most = u64::MAX / 8;
    let tensor = |index: u64, numel: u64| {
        let start = index * most;
        let end = start + numel;
        format!(r#""t{index}":{{"dtype":"U8","shape":[{numel}],"data_offsets":[{start},{end}]}}"#)
    };
    let tensors: Vec<_> = (0..9).map(|index| tensor(index, if index < 8 { most } else { 1 })).collect();
    let header = format!("{{{}}}", tensors.join(","));
    let content = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let chunks = vec![Digest::of(&content)];
    let (name, bytes) = ("rank-00000-of-00001.safetensors".to_owned(), content.len() as u64);
    manifest.files.push(FileRecord { name: name.clone(), bytes, hash: Digest::of_chunks(&chunks), chunks });
    for (name, content) in [(name.as_str(), content), ("manifest.json", manifest.to_bytes())] {
        let mut file = storage.create(&format!("step-0000000001/{name}"), content.len() as u64).unwrap();
        file.write(&content).unwrap();
        file.finish().unwrap();
    }
    let problems = problems(&storage);
    assert!(problems.contains("it has `t8` where no file reaches"), "{problems}");
}
