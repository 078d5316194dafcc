//! Recorded runs of PyTorch, trained again by the engine. `ZERO_VECTORS=DIR` reads other recordings of the same form.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Int, Tensor, TensorData};
use gpt::GptConfig;
use serde_json::Value;
use zero_burn::{
    Adam, Communicator, Fused, LocalWorld, Partition, ShardOptimizer, WeightDecay, WorldSize, Zero,
    ZeroConfig, ZeroError,
};
use zero_checkpoint::{WeightsFile, transpose};

/// The device of a rank.
pub type DeviceOf<'a> = &'a (dyn Fn(&Arc<dyn Communicator>) -> Result<Device, ZeroError> + Sync);

/// How far a run may be from PyTorch's, relative to it.
pub struct Bounds {
    pub loss: f64,
    pub norm: f64,
    /// Of final weights, absolute; `None` where they are not compared.
    pub weight: Option<f32>,
    /// Which share of final weights may be farther off: Adam makes steps of any gradient, those that are rounding alone too.
    pub outliers: f64,
}

pub const SAME_TYPE: Bounds = Bounds { loss: 1e-4, norm: 1e-3, weight: Some(1e-4), outliers: 0.0 };
/// Layers compute in `f16`, which has 11 bits, or in `bf16`, which has 8.
pub const F16: Bounds = Bounds { loss: 1e-3, norm: 2e-2, weight: None, outliers: 0.0 };
pub const BF16: Bounds = Bounds { loss: 1e-2, norm: 1e-1, weight: None, outliers: 0.0 };

pub struct Recording {
    config: GptConfig,
    settings: Value,
    losses: Vec<f64>,
    norms: Vec<f64>,
    tensors: WeightsFile,
}

impl Recording {
    pub fn read(name: &str) -> Self {
        let folder = std::env::var_os("ZERO_VECTORS")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/vectors"), PathBuf::from);
        let text = std::fs::read_to_string(folder.join(format!("{name}.json"))).unwrap();
        let json: Value = serde_json::from_str(&text).unwrap();
        let numbers =
            |key: &str| json[key].as_array().unwrap().iter().map(|value| value.as_f64().unwrap()).collect();
        let settings = json["config"].clone();
        let size = |key: &str| settings[key].as_u64().unwrap() as usize;
        assert_eq!(settings["gelu"], "erf", "the model has the erf GELU");
        assert_eq!(settings["layer_norm_eps"].as_f64(), Some(1e-5));
        let recording = Self {
            config: GptConfig {
                vocab: size("vocab"),
                context: size("context"),
                dim: size("dim"),
                heads: size("heads"),
                layers: size("layers"),
                tied: settings["tied"].as_bool().unwrap(),
            },
            losses: numbers("losses"),
            norms: numbers("grad_norms"),
            tensors: WeightsFile::open(folder.join(format!("{name}.safetensors"))).unwrap(),
            settings,
        };
        assert!(!recording.losses.is_empty() && recording.losses.len() == recording.norms.len());
        recording
    }

    fn number(&self, key: &str) -> f64 {
        self.settings[key].as_f64().unwrap()
    }

    /// Values of `path` in the set `init` or `final`, in Burn's layout.
    fn values(&self, set: &str, path: &str) -> Vec<f32> {
        let path = path.replace(".gamma", ".weight").replace(".beta", ".bias");
        let name = format!("{set}.{path}");
        let values = self.tensors.read_f32(&name).unwrap();
        // Tables are stored alike; the weights of linear layers are transposed.
        match self.tensors.info(&name).unwrap().shape[..] {
            [rows, columns] if !path.starts_with("wte") && !path.starts_with("wpe") => {
                transpose(&values, rows, columns).unwrap()
            }
            _ => values,
        }
    }

    /// How far rounding alone carried PyTorch's own biases of the keys.
    ///
    /// The same bias on every key shifts all scores of a query alike, which softmax ignores: the exact gradient is
    /// zero, the computed one is rounding noise, and Adam scales noise up to steps of any size. Where weight decay
    /// alone would have left the bias is known; what is beyond it is noise.
    fn key_bias_noise(&self, path: &str) -> f32 {
        let decay =
            (1.0 - self.number("lr") * self.number("weight_decay")).powi(self.losses.len() as i32) as f32;
        let keys = self.config.dim..2 * self.config.dim;
        let drift = |(initial, last): (&f32, &f32)| (last - initial * decay).abs();
        let (initial, last) = (self.values("init", path), self.values("final", path));
        initial[keys.clone()].iter().zip(&last[keys]).map(drift).fold(0.0, f32::max)
    }

    fn rows(&self, tokens: &[i32], rows: Range<usize>, device: &Device) -> [Tensor<2, Int>; 2] {
        let width = self.config.context + 1;
        [0, 1].map(|from| {
            let values: Vec<i32> = rows
                .clone()
                .flat_map(|row| tokens[row * width + from..][..self.config.context].iter().copied())
                .collect();
            Tensor::from_data(TensorData::new(values, [rows.len(), self.config.context]), device)
        })
    }

    /// By Burn's AdamW and by `Fused`.
    pub fn replay(&self, config: &ZeroConfig, world: WorldSize, bounds: &Bounds, device: DeviceOf<'_>) {
        let betas = self.settings["betas"].as_array().unwrap();
        let betas = [0, 1].map(|at| betas[at].as_f64().unwrap());
        let burn = AdamWConfig::new()
            .with_beta_1(betas[0] as f32)
            .with_beta_2(betas[1] as f32)
            .with_epsilon(self.number("eps") as f32)
            .with_weight_decay(self.number("weight_decay") as f32);
        self.replay_by(config, world, bounds, &burn.build(), device);
        self.replay_fused(config, world, bounds, device);
    }

    /// By `Fused` alone.
    pub fn replay_fused(&self, config: &ZeroConfig, world: WorldSize, bounds: &Bounds, device: DeviceOf<'_>) {
        let betas = self.settings["betas"].as_array().unwrap();
        let betas = [0, 1].map(|at| betas[at].as_f64().unwrap());
        let fused = Adam {
            beta1: betas[0],
            beta2: betas[1],
            epsilon: self.number("eps"),
            weight_decay: WeightDecay::Decoupled(self.number("weight_decay")),
        };
        self.replay_by(config, world, bounds, &Fused::new(fused).unwrap(), device);
    }

    fn replay_by(
        &self,
        config: &ZeroConfig,
        world: WorldSize,
        bounds: &Bounds,
        optimizer: &(impl ShardOptimizer + Clone + Sync),
        device: DeviceOf<'_>,
    ) {
        let (threshold, compute) = (config.persistence_threshold, config.precision.compute);
        let at = format!("{}, {world} ranks, threshold {threshold}, {compute}", config.stage);
        let batch = self.number("batch") as usize;
        let config = ZeroConfig {
            clip_norm: Some(self.number("clip_norm")),
            // Several buckets, and some parameters larger than one.
            bucket_bytes: zero_burn::Bytes::new(20_000),
            ..config.clone()
        };
        let tokens = self.tensors.read_i32("tokens").unwrap();
        let per_step = tokens.len() / self.losses.len();
        LocalWorld::new(world)
            .run(|comm| -> Result<(), ZeroError> {
                let zero = Zero::new(config.clone(), &comm, device(&comm)?)?;
                let mut model = zero.shard(|device| {
                    self.config.init(device).map(&mut Load { recording: self, path: Vec::new() })
                })?;
                let mut optim = zero.optimizer(optimizer.clone())?;
                let share = Partition::new(batch, world).range(comm.rank());
                for (step, tokens) in tokens.chunks(per_step).enumerate() {
                    if share.is_empty() {
                        zero.skip_backward()?;
                    } else {
                        let [tokens, targets] = self.rows(tokens, share.clone(), zero.device());
                        zero.backward_weighted(model.loss(tokens, targets), share.len() as f64)?;
                    }
                    let outcome = optim.step(self.number("lr"), &mut model)?;
                    assert_close(
                        outcome.loss,
                        self.losses[step],
                        bounds.loss,
                        &format!("loss of step {step} at {at}"),
                    );
                    assert_close(
                        outcome.grad_norm,
                        self.norms[step],
                        bounds.norm,
                        &format!("norm of step {step} at {at}"),
                    );
                }
                let whole = zero.unshard(&model)?;
                let Some(bound) = bounds.weight else { return Ok(()) };
                let mut compare = Compare {
                    recording: self,
                    path: Vec::new(),
                    compared: 0,
                    bound,
                    numel: 0,
                    outliers: Vec::new(),
                };
                whole.visit(&mut compare);
                let expected = self.tensors.names().filter(|name| name.starts_with("final.")).count();
                assert_eq!(compare.compared, expected, "every recorded weight is compared at {at}");
                let Compare { numel, outliers, .. } = compare;
                let share = outliers.len() as f64 / numel as f64;
                assert!(
                    share <= bounds.outliers,
                    "{share} of all weights are off at {at}: {:?}",
                    outliers.first()
                );
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{at}: {error}"));
    }
}

fn assert_close(value: f64, expected: f64, relative: f64, what: &str) {
    let off = (value - expected).abs() / expected.abs();
    assert!(off <= relative, "{what}: {value} instead of {expected}, off by {off:e}");
}

struct Load<'a> {
    recording: &'a Recording,
    path: Vec<String>,
}

impl ModuleMapper for Load<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let values = self.recording.values("init", &self.path.join("."));
        let device = param.lazy_device();
        let value = Tensor::from_data(TensorData::new(values, param.lazy_shape()), &device).require_grad();
        Param::initialized(param.id, value)
    }
}

struct Compare<'a> {
    recording: &'a Recording,
    path: Vec<String>,
    compared: usize,
    bound: f32,
    numel: usize,
    /// What is farther off than the bound.
    outliers: Vec<String>,
}

impl ModuleVisitor for Compare<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_owned());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.join(".");
        let expected = self.recording.values("final", &path);
        let values: Vec<f32> = param.val().into_data().iter::<f32>().collect();
        assert_eq!(values.len(), expected.len(), "{path}");
        self.numel += values.len();
        let dim = self.recording.config.dim;
        let noise = if path.ends_with("qkv.bias") { self.recording.key_bias_noise(&path) } else { 0.0 };
        for (at, (value, expected)) in values.iter().zip(&expected).enumerate() {
            let off = (value - expected).abs();
            // Both runs have their own noise.
            let is_key = (dim..2 * dim).contains(&at);
            let allowed = if is_key { self.bound + 2.0 * noise } else { self.bound };
            if off.is_nan() || off > allowed {
                self.outliers.push(format!("{path}[{at}]: {value} instead of {expected}"));
            }
        }
        self.compared += 1;
    }
}
