//! PyTorch computes the logits of a model that was trained here; `PYTHON` names the Python that has it.

mod common;

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor, TensorData};
use common::{folder, train};
use gpt::GptConfig;
use zero_burn::{
    Adam, Fused, LoadOptions, LocalStorage, LocalWorld, SaverOptions, Storage, WorldSize, Zero, ZeroConfig,
    ZeroError,
};
use zero_checkpoint::{Checkpoint, ConsolidateOptions, consolidate};

const ROWS: [[i32; 8]; 2] = [[0, 1, 2, 3, 5, 8, 13, 21], [255, 254, 7, 7, 7, 100, 42, 0]];

/// The logits of the newest checkpoint, by Burn.
fn ours(config: GptConfig, storage: &Arc<dyn Storage>) -> Vec<f32> {
    let logits = LocalWorld::new(WorldSize::ONE).run(|comm| -> Result<Vec<f32>, ZeroError> {
        let zero = Zero::new(ZeroConfig::default(), &comm, Device::default())?;
        let model = zero.shard(|device| config.init(device))?;
        let mut optimizer = zero.optimizer(Fused::new(Adam::ADAMW)?)?;
        let mut checkpoints = zero.checkpoints(Arc::clone(storage), SaverOptions::default())?;
        checkpoints.load(&mut optimizer, None, &LoadOptions::default())?;
        let tokens = TensorData::new(ROWS.concat(), [ROWS.len(), ROWS[0].len()]);
        let tokens = Tensor::<2, Int>::from_data(tokens, &Device::default());
        Ok(model.valid().forward(tokens).into_data().iter::<f32>().collect())
    });
    logits.unwrap().remove(0)
}

#[test]
#[ignore = "needs Python with PyTorch and safetensors"]
fn pytorch_gives_the_logits_of_a_consolidated_model() {
    for tied in [false, true] {
        let folder = folder();
        if tied {
            let path = folder.path().join("tiny.toml");
            let text = std::fs::read_to_string(&path).unwrap();
            std::fs::write(path, text.replace("[train]", "tied = true\n[train]")).unwrap();
        }
        train(&folder, &["--ranks", "3", "--stage", "3", "--lr", "0.05", "--checkpoint-dir", "checkpoints"]);
        let storage: Arc<dyn Storage> = Arc::new(LocalStorage::new(folder.path().join("checkpoints")));
        let weights = folder.path().join("weights");
        let checkpoint = Checkpoint::open_latest(Arc::clone(&storage)).unwrap();
        consolidate(&checkpoint, &weights, &ConsolidateOptions::default(), &mut |_| {}).unwrap();
        let config = GptConfig { context: 16, dim: 16, heads: 2, layers: 2, tied, ..GptConfig::default() };
        let expected = ours(config, &storage);

        let python = std::env::var_os("PYTHON").unwrap_or_else(|| "python3".into());
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/logits.py");
        let mut run = Command::new(python)
            .arg(script)
            .arg(&weights)
            .arg(config.heads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        run.stdin.take().unwrap().write_all(&serde_json::to_vec(&ROWS).unwrap()).unwrap();
        let output = run.wait_with_output().unwrap();
        assert!(output.status.success());
        let theirs: Vec<Vec<f32>> = serde_json::from_slice(&output.stdout).unwrap();
        let theirs = theirs.concat();
        assert_eq!(theirs.len(), expected.len());
        let largest = expected.iter().fold(0.0_f32, |largest, logit| largest.max(logit.abs()));
        assert!(largest > 0.05, "the model has learned something: {largest}");
        for (theirs, ours) in theirs.iter().zip(&expected) {
            assert!((theirs - ours).abs() <= 1e-5, "{theirs} and {ours}, tied: {tied}");
        }
    }
}
