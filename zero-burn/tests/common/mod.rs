//! What the engine's tests share: a model with every awkward kind of parameter, and its two ways to train.
#![allow(dead_code, unreachable_pub, reason = "each test file uses its own part")]

use std::collections::HashSet;
use std::env;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::{Device, Distribution, FloatDType, Tensor, TensorData};
use zero_burn::{
    Bytes, Communicator, DType, DeviceKind, LocalWorld, Partition, ProcessWorld, Rank, ShardOptimizer, Stage,
    StepOutcome, WorldSize, Zero, ZeroConfig, ZeroError, materialize,
};
use zero_comm::{Coordinator, CoordinatorOptions, Meeting, Token};

pub const WIDTH: usize = 5;
pub const INPUT: usize = 7;
pub const LR: f64 = 0.01;
pub const SEED: u64 = 11;

/// Odd sizes, fewer elements than ranks, a scalar, nothing at all, frozen, tied, and blocks that may be skipped.
#[derive(Module, Debug)]
pub struct Odd {
    pub input: Linear,
    pub blocks: Vec<Linear>,
    pub scale: Param<Tensor<1>>,
    pub nothing: Param<Tensor<2>>,
    pub frozen: Linear,
    pub shared: Linear,
    pub tied: Linear,
    pub unused: Linear,
    pub output: Linear,
}

impl Odd {
    pub fn new(device: &Device) -> Self {
        let square = || LinearConfig::new(WIDTH, WIDTH).init(device);
        let shared = square();
        Self {
            input: LinearConfig::new(INPUT, WIDTH).init(device),
            blocks: (0..4).map(|_| square()).collect(),
            scale: lazy([1], device),
            nothing: lazy([0, 3], device),
            frozen: square().no_grad(),
            tied: shared.clone(),
            shared,
            unused: square(),
            output: LinearConfig::new(WIDTH, 1).init(device),
        }
    }

    /// `skip` has a bit for each block not to run.
    pub fn loss(&self, rows: Tensor<2>, skip: u32) -> Tensor<1> {
        self.loss_with(rows, skip, &self.tied, |x| x)
    }

    /// As `loss`, with `hook` between the blocks and what follows them.
    pub fn loss_through(&self, rows: Tensor<2>, hook: impl Fn(Tensor<2>) -> Tensor<2>) -> Tensor<1> {
        self.loss_with(rows, 0, &self.tied, hook)
    }

    fn loss_with(
        &self,
        rows: Tensor<2>,
        skip: u32,
        tied: &Linear,
        hook: impl Fn(Tensor<2>) -> Tensor<2>,
    ) -> Tensor<1> {
        let target = rows.clone().slice([0..rows.dims()[0], 0..1]).sin();
        let mut x = self.input.forward(rows).tanh();
        for (index, block) in self.blocks.iter().enumerate() {
            if skip & (1 << index) == 0 {
                x = x.clone() + block.forward(x).tanh();
            }
        }
        x = self.shared.forward(hook(x)).tanh();
        x = self.frozen.forward(x).tanh();
        x = tied.forward(x).tanh();
        let x = self.output.forward(x) * self.scale.val().reshape([1, 1]);
        (x - target).square().mean() + self.nothing.val().sum()
    }
}

pub fn lazy<const D: usize>(shape: [usize; D], device: &Device) -> Param<Tensor<D>> {
    Param::uninitialized(
        ParamId::new(),
        move |device, require_grad| {
            Tensor::random(shape, Distribution::Uniform(0.5, 1.5), device).set_require_grad(require_grad)
        },
        device.clone(),
        true,
        shape.into(),
    )
}

/// Row `row` of step `step`: the same for whoever asks.
pub fn rows(step: usize, range: std::ops::Range<usize>, device: &Device) -> Tensor<2> {
    let values: Vec<f32> = range
        .clone()
        .flat_map(|row| {
            (0..INPUT).map(move |column| ((step * 131 + row * 17 + column * 7) as f32 * 0.37).sin())
        })
        .collect();
    Tensor::from_data(TensorData::new(values, [range.len(), INPUT]), device)
}

/// The kind of device to test on, by `ZERO_DEVICE`.
pub fn kind() -> DeviceKind {
    let default = if cfg!(feature = "vulkan") { "vulkan" } else { "wgpu" };
    env::var("ZERO_DEVICE").unwrap_or_else(|_| String::from(default)).parse().unwrap()
}

/// The device of a rank, of the kind to test on; a test without one fails.
///
/// Ranks spin while the queue of CubeCL's server is full. Where cores are few, they would take them from the server, which
/// they wait for: it starts here, and then this rank and the threads that it starts give way.
pub fn device(comm: &Arc<dyn Communicator>) -> Result<Device, ZeroError> {
    let device = kind().device_of_rank(comm)?;
    Tensor::<1>::zeros([1], &device).into_data();
    rustix::process::nice(19).unwrap();
    Ok(device)
}

pub fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig {
        stage,
        seed: SEED,
        persistence_threshold: 0,
        // A few parameters each, so that there are several.
        bucket_bytes: Bytes::new(200),
        deadline_seconds: 20.0,
        ..ZeroConfig::default()
    }
}

pub fn world(size: usize) -> WorldSize {
    WorldSize::new(size).expect("tests ask for worlds with ranks")
}

pub fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_weight_decay(0.01)
}

/// Whole parameters by path.
pub type Weights = Vec<(String, Vec<f32>)>;

pub fn weights<M: Module>(model: &M) -> Weights {
    #[derive(Default)]
    struct Collect(Vec<String>, Weights);
    impl ModuleVisitor for Collect {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.0.push(name.to_owned());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.0.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.1.push((self.0.join("."), param.val().into_data().iter::<f32>().collect()));
        }
    }
    let mut collect = Collect::default();
    model.visit(&mut collect);
    collect.1
}

/// Runs `f` on every rank with an engine of its own, and gives what each returned.
pub fn with_engines<T: Send>(
    config: &ZeroConfig,
    size: usize,
    f: impl Fn(&Arc<dyn Communicator>, Zero) -> Result<T, ZeroError> + Sync,
) -> Vec<T> {
    with_engines_on(&|_| Ok(Device::flex()), config, size, f)
}

/// The device of a rank.
pub type DeviceOf<'a> = &'a (dyn Fn(&Arc<dyn Communicator>) -> Result<Device, ZeroError> + Sync);

/// As [`with_engines`], on other devices.
pub fn with_engines_on<T: Send>(
    device: DeviceOf<'_>,
    config: &ZeroConfig,
    size: usize,
    f: impl Fn(&Arc<dyn Communicator>, Zero) -> Result<T, ZeroError> + Sync,
) -> Vec<T> {
    LocalWorld::new(world(size))
        .with_deadline(config.deadline())
        .run(|comm| f(&comm, Zero::new(config.clone(), &comm, device(&comm)?)?))
        .unwrap_or_else(|error| panic!("{:?} on {size} ranks: {error}", config.stage))
}

/// The whole model on every rank, wherever its master weights are. Collective.
pub fn whole<M: Module>(zero: &Zero, model: &M) -> Result<M, ZeroError> {
    match zero.unshard(model) {
        Err(ZeroError::MastersOnDisk) => {}
        whole => return whole,
    }
    let mut own = None;
    for root in zero.communicator().world_size().ranks() {
        let whole = zero.unshard_to(model, root)?;
        own = own.or(whole);
    }
    Ok(own.expect("every rank had its turn"))
}

/// Files of stores in a directory that hold something.
pub fn data_files(directory: &Path) -> Vec<PathBuf> {
    let runs = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = runs.flat_map(|run| fs::read_dir(run).unwrap().map(|entry| entry.unwrap().path()));
    files.filter(|file| file.metadata().unwrap().len() > 0).collect()
}

/// Changes every byte of files, and gives what they held.
pub fn alter(files: &[PathBuf]) -> Vec<Vec<u8>> {
    let contents: Vec<_> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    for (file, bytes) in files.iter().zip(&contents) {
        let altered: Vec<u8> = bytes.iter().map(|byte| byte ^ 1).collect();
        fs::write(file, altered).unwrap();
    }
    contents
}

/// Undoes what [`alter`] did.
pub fn restore(files: &[PathBuf], contents: &[Vec<u8>]) {
    for (file, bytes) in files.iter().zip(contents) {
        fs::write(file, bytes).unwrap();
    }
}

/// What a rank does.
pub type Body<'a, T> = &'a (dyn Fn(&Arc<dyn Communicator>) -> Result<T, ZeroError> + Sync);

/// Runs `body` on ranks that are threads, each with everything that a process has; `host` says where they seem to run.
pub fn processes<T: Send>(
    config: &ZeroConfig,
    size: usize,
    body: Body<'_, T>,
    host: fn(usize) -> usize,
) -> Vec<T> {
    let token = Token::generate().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let options = CoordinatorOptions {
        size: world(size),
        token: token.clone(),
        deadline: config.deadline(),
        host: None,
    };
    let coordinator = Coordinator::new(listener, options).unwrap();
    let address = coordinator.address().to_string();
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let meeting = Meeting::Coordinator { address: address.clone() };
                let process = ProcessWorld::new(Rank::new(rank), world(size), meeting)
                    .with_token(token.clone())
                    .with_host(format!("host {}", host(rank)))
                    .with_deadline(config.deadline());
                scope.spawn(move || process.run(|comm| body(&comm)).unwrap())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Rows in the type that layers compute in.
pub fn cast<const D: usize>(rows: Tensor<D>, config: &ZeroConfig) -> Tensor<D> {
    rows.cast(match config.precision.compute {
        DType::F16 => FloatDType::F16,
        DType::BF16 => FloatDType::BF16,
        _ => FloatDType::F32,
    })
}

/// What a run gives: the outcome of each step and the final weights.
#[derive(Debug, PartialEq)]
pub struct Run {
    pub losses: Vec<f64>,
    pub norms: Vec<f64>,
    pub weights: Weights,
}

impl Run {
    pub fn new() -> Self {
        Self { losses: Vec::new(), norms: Vec::new(), weights: Vec::new() }
    }

    pub fn record(&mut self, outcome: &StepOutcome) {
        self.losses.push(outcome.loss);
        self.norms.push(outcome.grad_norm);
    }

    pub fn assert_close(&self, other: &Self, relative: f64, what: &str) {
        assert_eq!(self.losses.len(), other.losses.len(), "{what}");
        assert!(!self.losses.is_empty(), "{what}");
        for (step, (a, b)) in self.losses.iter().zip(&other.losses).enumerate() {
            assert!((a - b).abs() <= relative * b.abs().max(1e-3), "{what}: loss {a} and {b} at step {step}");
        }
        for (step, (a, b)) in self.norms.iter().zip(&other.norms).enumerate() {
            assert!((a - b).abs() <= relative * b.abs().max(1e-3), "{what}: norm {a} and {b} at step {step}");
        }
        assert_eq!(self.weights.len(), other.weights.len(), "{what}");
        for ((path, a), (other_path, b)) in self.weights.iter().zip(&other.weights) {
            assert_eq!(path, other_path, "{what}");
            assert_eq!(a.len(), b.len(), "{what}: {path}");
            for (a, b) in a.iter().zip(b) {
                assert!(f64::from((a - b).abs()) <= relative * 10.0, "{what}: {path}: {a} and {b}");
            }
        }
    }
}

/// Which blocks a row's rank skips: `None` for a run in which none are.
pub type Skips<'a> = &'a (dyn Fn(usize, usize) -> u32 + Sync);

pub fn no_skips(_step: usize, _rank: usize) -> u32 {
    0
}

/// Trains [`Odd`] on `batch` rows a step, split over the ranks.
pub fn sharded(config: &ZeroConfig, size: usize, steps: usize, batch: usize, skips: Skips<'_>) -> Run {
    sharded_by(&adamw().build(), config, size, steps, batch, skips)
}

/// As [`sharded`], by another optimizer; rows are of the type that layers compute in.
pub fn sharded_by(
    optimizer: &(impl ShardOptimizer + Clone + Sync),
    config: &ZeroConfig,
    size: usize,
    steps: usize,
    batch: usize,
    skips: Skips<'_>,
) -> Run {
    let mut runs = with_engines(config, size, |comm, zero| {
        let mut model = zero.shard(Odd::new)?;
        let mut optimizer = zero.optimizer(optimizer.clone())?;
        let share = Partition::new(batch, world(size)).range(comm.rank());
        let mut run = Run::new();
        for step in 0..steps {
            if share.is_empty() {
                zero.skip_backward()?;
            } else {
                let input = cast(rows(step, share.clone(), zero.device()), config);
                let loss = model.loss(input, skips(step, comm.rank().index()));
                zero.backward_weighted(loss, share.len() as f64)?;
            }
            run.record(&optimizer.step(LR, &mut model)?);
        }
        run.weights = weights(&whole(&zero, &model)?);
        Ok(run)
    });
    let first = runs.remove(0);
    for other in &runs {
        assert_eq!(first, *other, "every rank sees the same run");
    }
    first
}

/// Trains [`Odd`] with Burn alone, on the same rows with the same skips, as `size` ranks would split them.
pub fn plain(clip_norm: Option<f64>, size: usize, steps: usize, batch: usize, skips: Skips<'_>) -> Run {
    let device = Device::flex().autodiff();
    let mut model = materialize(&device, SEED, Odd::new);
    let mut optimizer = adamw().init();
    let mut run = Run::new();
    for step in 0..steps {
        let parts = Partition::new(batch, world(size)).ranges().filter(|(_, range)| !range.is_empty()).map(
            |(rank, range)| {
                let weight = range.len() as f64 / batch as f64;
                // One field for both uses: Burn's optimizers would update two fields apart.
                model.loss_with(rows(step, range, &device), skips(step, rank.index()), &model.shared, |x| x)
                    * weight
            },
        );
        let loss = parts.reduce(|a, b| a + b).expect("a batch has rows");
        run.losses.push(f64::from(loss.clone().into_scalar::<f32>()));
        let mut gradients = GradientsParams::from_grads(loss.backward(), &model);
        let mut norm = Norm { gradients: &mut gradients, seen: HashSet::new(), sum: 0.0, factor: None };
        model.visit(&mut norm);
        let total = norm.sum.sqrt();
        if let Some(limit) = clip_norm {
            norm.factor = Some((limit / (total + 1e-6)).min(1.0));
            norm.seen.clear();
            model.visit(&mut norm);
        }
        run.norms.push(total);
        model = optimizer.step(LR, model, gradients);
        model.tied = model.shared.clone();
    }
    run.weights = weights(&model.valid());
    run
}

struct Norm<'a> {
    gradients: &'a mut GradientsParams,
    /// A tied parameter is visited at each of its paths.
    seen: HashSet<ParamId>,
    sum: f64,
    factor: Option<f64>,
}

impl ModuleVisitor for Norm<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !self.seen.insert(param.id) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        let gradient = match self.factor {
            Some(factor) => gradient.mul_scalar(factor),
            None => gradient,
        };
        self.sum +=
            gradient.clone().into_data().iter::<f32>().map(|value| f64::from(value).powi(2)).sum::<f64>();
        self.gradients.register(param.id, gradient);
    }
}
