//! Blocks that backward runs again: the same gradients to the bit, and no silence where that cannot be.

mod common;

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, Embedding, EmbeddingConfig, Linear, LinearConfig,
};
use burn::tensor::{Bool, Device, Distribution, FloatDType, Gradients, Int, Tensor, TensorData};
use common::{LR, Weights, adamw, config, lazy, weights, with_engines};
use zero_burn::{
    DType, Precision, ReduceGradients, Stage, Zero, ZeroConfig, ZeroError, materialize, recompute,
    recompute_seeded,
};

const WIDTH: usize = 6;

#[derive(Module, Debug)]
struct Block {
    wide: Linear,
    narrow: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self {
            wide: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
            narrow: LinearConfig::new(2 * WIDTH, WIDTH).init(device),
            dropout: DropoutConfig::new(0.3).init(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        x.clone() + self.narrow.forward(self.wide.forward(x).tanh())
    }

    /// A second input, another that is a constant, and one that may be absent.
    fn mixed(
        &self,
        (x, y, mask, bias): (Tensor<2>, Tensor<2>, Tensor<2, Bool>, Option<Tensor<1>>),
    ) -> Tensor<2> {
        let x = self.forward(x.mask_fill(mask, 0.5)) * y;
        match bias {
            Some(bias) => x + bias.unsqueeze(),
            None => x,
        }
    }

    fn random(&self, x: Tensor<2>) -> Tensor<2> {
        self.dropout.forward(self.forward(x))
    }
}

/// Blocks, one of them frozen, one used twice, and a table that is used in a block and outside.
#[derive(Module, Debug)]
struct Model {
    table: Embedding,
    blocks: Vec<Block>,
    frozen: Block,
    scale: Param<Tensor<1>>,
}

impl Model {
    fn new(device: &Device) -> Self {
        Self {
            table: EmbeddingConfig::new(5, WIDTH).init(device),
            blocks: (0..3).map(|_| Block::new(device)).collect(),
            frozen: Block::new(device).no_grad(),
            scale: lazy([1], device),
        }
    }

    fn look_up(table: &Embedding, tokens: Tensor<1, Int>) -> Tensor<2> {
        table.weight.val().select(0, tokens)
    }

    /// `again` of every kind of block.
    fn loss(&self, tokens: Tensor<1, Int>, again: bool) -> Tensor<1> {
        let block =
            |block: &Block, x| if again { recompute(block, x, Block::forward) } else { block.forward(x) };
        let mut x = match again {
            true => recompute(&self.table, tokens, Self::look_up),
            false => Self::look_up(&self.table, tokens),
        };
        for each in &self.blocks {
            x = block(each, x);
        }
        x = block(&self.frozen, x);
        // Two at once, the second within the first.
        x = match again {
            true => recompute(&self.blocks, x, |blocks, x| {
                recompute(&blocks[1], blocks[0].forward(x), Block::forward)
            }),
            false => self.blocks[1].forward(self.blocks[0].forward(x)),
        };
        let mask = x.clone().inner().greater_elem(0.2);
        let inputs = (
            x.clone(),
            x.clone() * self.scale.val().unsqueeze(),
            mask,
            Some(self.scale.val().repeat(&[WIDTH])),
        );
        x = match again {
            true => recompute(&self.blocks[2], inputs, Block::mixed),
            false => self.blocks[2].mixed(inputs),
        };
        let logits = self.table.weight.val().matmul(x.transpose());
        logits.square().mean()
    }
}

fn tokens(seed: usize, rows: usize, device: &Device) -> Tensor<1, Int> {
    let tokens: Vec<_> = (0..rows).map(|row| ((seed * 7 + row * 3) % 5) as i64).collect();
    Tensor::from_data(TensorData::new(tokens, [rows]), device)
}

/// What every parameter has as gradient, by its identity.
fn gradients<M: Module>(model: &M, gradients: &Gradients) -> HashMap<ParamId, Vec<f32>> {
    struct Collect<'a>(&'a Gradients, HashMap<ParamId, Vec<f32>>);
    impl ModuleVisitor for Collect<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(gradient) = param.base().grad(self.0) {
                self.1.insert(param.id, gradient.into_data().try_to_vec().unwrap());
            }
        }
    }
    let mut collect = Collect(gradients, HashMap::new());
    model.visit(&mut collect);
    collect.1
}

/// With autodiff, by either strategy.
fn devices() -> [Device; 2] {
    [Device::default().autodiff(), Device::default().autodiff().gradient_checkpointing()]
}

#[test]
fn a_plain_model_has_the_same_gradients() {
    for device in devices() {
        let model = materialize(&device, 3, Model::new);
        let run = |again| {
            let loss = model.loss(tokens(1, 7, &device), again);
            (loss.clone().into_data().try_to_vec::<f32>().unwrap(), gradients(&model, &loss.backward()))
        };
        let (kept, again) = (run(false), run(true));
        // A table, three blocks of four, and the scale.
        assert_eq!(kept.1.len(), 1 + 12 + 1);
        assert_eq!(kept, again);
        assert_eq!(run(true), again);
    }
}

#[test]
fn without_autodiff_it_is_the_block() {
    let device = Device::default();
    let model = materialize(&device, 3, Model::new);
    let losses = [false, true].map(|again| model.loss(tokens(1, 7, &device), again).into_scalar::<f32>());
    assert_eq!(losses[0], losses[1]);
    let trained = materialize(&device.autodiff(), 3, Model::new).valid();
    assert_eq!(trained.loss(tokens(1, 7, &Device::default()), true).into_scalar::<f32>(), losses[0]);
}

#[test]
fn inputs_have_gradients_the_unused_and_the_empty_too() {
    for device in devices() {
        let block = Block::new(&device);
        let leaf =
            |rows| Tensor::<2>::random([rows, WIDTH], Distribution::Normal(0.0, 1.0), &device).require_grad();
        let (x, unused, nothing) = (leaf(3), leaf(2), leaf(0));
        let inputs = (x.clone() * 1.0, unused.clone() * 2.0, nothing.clone() * 3.0);
        let output = recompute(&block, inputs, |block, (x, _, nothing)| {
            block.forward(x).sum_dim(0) + block.forward(nothing).sum_dim(0)
        });
        let of = output.sum().backward();
        let expected = (block.forward(x.clone()).sum_dim(0)).sum().backward();
        let vec = |tensor: Option<Tensor<2>>| tensor.unwrap().into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(vec(x.grad(&of)), vec(x.grad(&expected)));
        assert_eq!(vec(unused.grad(&of)), [0.0; 2 * WIDTH]);
        assert_eq!(vec(nothing.grad(&of)), [0.0; 0]);
    }
}

#[test]
fn a_block_without_anything_to_learn_is_left_off_the_tape() {
    let device = Device::default().autodiff();
    let block = Block::new(&device).no_grad();
    let x = Tensor::<2>::ones([3, WIDTH], &device);
    assert!(!recompute(&block, x.clone(), Block::forward).is_tracked());
    assert!(recompute(&block, x.clone().require_grad(), Block::forward).is_tracked());
    assert!(recompute(&Block::new(&device), x, Block::forward).is_tracked());
    // What does not come from the inputs has no gradient to give.
    let y = Tensor::<2>::ones([3, WIDTH], &device).require_grad();
    let constant = recompute(&block, y.clone(), |_, y| y.ones_like());
    let gradients = (constant.sum() + y.clone().sum() * 2.0).backward();
    assert_eq!(y.grad(&gradients).unwrap().into_data().try_to_vec::<f32>().unwrap(), [2.0; 3 * WIDTH]);
}

/// What training gives: losses and norms by step, and the weights.
type Told = (Vec<[f64; 2]>, Weights);

fn train(zero: &Zero, rank: usize, again: bool) -> Result<Told, ZeroError> {
    let mut model = zero.shard(Model::new)?;
    let mut optimizer = zero.optimizer(adamw().build())?;
    let mut told = Vec::new();
    for step in 0..3 {
        for micro in 0..2 {
            let tokens = tokens(step * 31 + micro * 5 + rank, 4, zero.device());
            zero.backward(model.loss(tokens, again).cast(FloatDType::F32))?;
        }
        let outcome = optimizer.step(LR, &mut model)?;
        told.push([outcome.loss, outcome.grad_norm]);
    }
    Ok((told, weights(&zero.unshard(&model)?)))
}

fn assert_trains_the_same(config: &ZeroConfig, size: usize) {
    let [kept, again] = [false, true]
        .map(|again| with_engines(config, size, |comm, zero| train(&zero, comm.rank().index(), again)));
    assert_eq!(kept, again, "{size} ranks, {config:?}");
}

#[test]
fn a_sharded_model_trains_the_same_at_every_stage() {
    for (stage, size) in Stage::ALL.into_iter().flat_map(|stage| [1, 2, 3].map(|size| (stage, size))) {
        let kinds = [ReduceGradients::AtStep, ReduceGradients::EveryBackward];
        for (overlap, reduce) in
            [true, false].into_iter().flat_map(|overlap| kinds.map(|kind| (overlap, kind)))
        {
            let config = ZeroConfig { overlap, reduce_gradients: Some(reduce), ..config(stage) };
            assert_trains_the_same(&config, size);
        }
    }
}

#[test]
fn so_it_does_in_16_bits_and_with_small_parameters_gathered() {
    for compute in [DType::F32, DType::BF16] {
        let precision = Precision { compute, ..Precision::default() };
        for persistence_threshold in [10, 1 << 20] {
            let config = ZeroConfig { precision, persistence_threshold, ..config(Stage::Three) };
            assert_trains_the_same(&config, 2);
        }
    }
}

#[test]
fn a_bucket_waits_for_what_a_block_will_bring() {
    #[derive(Module, Debug)]
    struct Tied {
        table: Embedding,
        block: Block,
    }
    // The head's gradient of the table comes first. It must not leave without that of the block, for then there were two
    // reductions.
    let reduced = |again| {
        with_engines(&ZeroConfig { overlap: false, ..config(Stage::Two) }, 2, |_, zero| {
            let model = zero.shard(|device| Tied {
                table: EmbeddingConfig::new(5, WIDTH).init(device),
                block: Block::new(device),
            })?;
            let tokens = tokens(0, 4, zero.device());
            let x = match again {
                true => recompute(&model.table, tokens, Model::look_up),
                false => Model::look_up(&model.table, tokens),
            };
            let x = recompute(&model.block, x, Block::forward);
            zero.backward(model.table.weight.val().matmul(x.transpose()).square().mean())?;
            Ok(zero.statistics()?.reduced)
        })
    };
    assert_eq!(reduced(true), reduced(false));
}

#[test]
fn a_loss_from_before_a_step_is_refused_before_its_blocks_run_with_other_weights() {
    for stage in Stage::ALL {
        with_engines(&config(stage), 2, |comm, zero| {
            let mut model = zero.shard(Block::new)?;
            let mut optimizer = zero.optimizer(adamw().build())?;
            let x = || Tensor::<2>::ones([2, WIDTH], zero.device()) * (1 + comm.rank().index()) as f64;
            let run = || recompute(&model, x(), Block::forward).square().mean();
            let old = run();
            zero.backward(run())?;
            optimizer.step(LR, &mut model)?;
            let refused = zero.backward(old);
            assert!(matches!(refused, Err(ZeroError::StaleLoss { .. })), "{stage}: {refused:?}");
            zero.backward(recompute(&model, x(), Block::forward).square().mean())?;
            optimizer.step(LR, &mut model).map(drop)
        });
    }
}

#[test]
fn gradients_of_another_backward_than_the_engines_are_noticed() {
    with_engines(&config(Stage::Three), 1, |_, zero| {
        let model = zero.shard(Block::new)?;
        let x = Tensor::<2>::ones([2, WIDTH], zero.device());
        drop(recompute(&model, x, Block::forward).sum().backward());
        assert!(matches!(zero.check(), Err(ZeroError::StrayGradient { .. })));
        Ok(())
    });
}

/// The loss and the gradients of a block with dropout; `seed` is for `recompute_seeded`, or for the generator.
fn dropped(block: &Block, seed: u64, again: bool) -> (f32, HashMap<ParamId, Vec<f32>>) {
    let device = block.wide.weight.device();
    let x = Tensor::<2>::ones([64, WIDTH], &device);
    let y = match again {
        true => recompute_seeded(block, x, seed, Block::random),
        false => {
            device.seed(seed);
            block.random(x)
        }
    };
    let loss = y.square().mean();
    let gradients = gradients(block, &loss.clone().backward());
    (loss.into_scalar(), gradients)
}

/// Whoever draws from Burn's generator, which tests of one process share.
static DRAWING: Mutex<()> = Mutex::new(());

#[test]
fn a_block_with_a_seed_draws_the_same_numbers_again() {
    let _alone = DRAWING.lock();
    let device = Device::default().autodiff();
    let block = materialize(&device, 5, Block::new);
    let kept: Vec<_> = (0..8).map(|seed| dropped(&block, seed, false)).collect();
    assert_ne!(kept[0], kept[1]);
    // One block after the other, then several at once.
    assert_eq!((0..8).map(|seed| dropped(&block, seed, true)).collect::<Vec<_>>(), kept);
    let at_once = thread::scope(|scope| {
        let threads = [0, 1, 2, 3].map(|thread| {
            let block = &block;
            scope.spawn(move || [dropped(block, thread, true), dropped(block, thread + 4, true)])
        });
        threads.map(|thread| thread.join().unwrap())
    });
    for (thread, [first, second]) in at_once.into_iter().enumerate() {
        assert_eq!((first, second), (kept[thread].clone(), kept[thread + 4].clone()));
    }
}

#[test]
fn after_a_block_with_a_seed_other_numbers_follow_than_in_it_and_after_its_other_run() {
    let _alone = DRAWING.lock();
    let device = Device::default().autodiff();
    let block = Block::new(&device);
    let draw = || Tensor::<1>::random([1], Distribution::Default, &device).into_scalar::<f32>();
    let x = || Tensor::<2>::ones([4, WIDTH], &device);
    let output = recompute_seeded(&block, x(), 7, Block::random);
    let after_forward = draw();
    drop(output.sum().backward());
    let after_backward = draw();
    device.seed(7);
    drop(block.random(x()));
    let in_line = draw();
    assert!(after_forward != after_backward && after_forward != in_line && after_backward != in_line);
}

#[test]
fn a_block_that_draws_without_a_seed_is_noticed() {
    let _alone = DRAWING.lock();
    with_engines(&config(Stage::Three), 1, |_, zero| {
        let mut model = zero.shard(Block::new)?;
        let mut optimizer = zero.optimizer(adamw().build())?;
        let x = || Tensor::<2>::ones([64, WIDTH], zero.device());
        let refused = zero.backward(recompute(&model, x(), Block::random).mean());
        let Err(ZeroError::BackwardFailed { message, .. }) = &refused else { panic!("{refused:?}") };
        assert!(message.contains("recompute_seeded"), "{message}");
        // The engine goes on.
        zero.backward(recompute_seeded(&model, x(), 1, Block::random).mean())?;
        optimizer.step(LR, &mut model).map(drop)
    });
}

/// What `run` panics with.
fn refusal<T>(run: impl FnOnce() -> T) -> String {
    let panic = catch_unwind(AssertUnwindSafe(|| drop(run()))).unwrap_err();
    let message = panic.downcast_ref::<String>().cloned();
    message.or(panic.downcast_ref::<&str>().map(|message| (*message).to_owned())).unwrap()
}

#[test]
fn gradients_that_would_be_lost_are_refused() {
    #[derive(Module, Debug)]
    struct Biased {
        block: Block,
        bias: Tensor<2>,
    }
    impl Biased {
        fn forward(&self, x: Tensor<2>) -> Tensor<2> {
            self.block.forward(x) + self.bias.clone()
        }
    }
    struct Doubled;
    impl ModuleMapper for Doubled {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|value| value * 2.0)
        }
    }
    let device = Device::default().autodiff();
    let x = Tensor::<2>::ones([3, WIDTH], &device);
    let bias = |learned: bool| Tensor::ones([3, WIDTH], &device).set_require_grad(learned) * 2.0;
    let biased = |learned| Biased { block: Block::new(&device), bias: bias(learned) };
    drop(recompute(&biased(false), x.clone(), Biased::forward).sum().backward());
    let message = refusal(|| recompute(&biased(true), x.clone(), Biased::forward));
    assert!(message.contains("pass it as an input"), "{message}");
    let doubled = Block::new(&device).map(&mut Doubled);
    let message = refusal(|| recompute(&doubled, x, Block::forward));
    assert!(message.contains("computed from others"), "{message}");
}

#[test]
fn a_block_without_autodiff_takes_inputs_with_it() {
    let device = Device::default().autodiff();
    let block = Block::new(&device).valid();
    let x = Tensor::<2>::ones([3, WIDTH], &device).require_grad();
    let gradient = |y: Tensor<2>| x.grad(&y.sum().backward()).unwrap().into_data();
    let again = gradient(recompute(&block, x.clone(), Block::forward));
    assert_eq!(again, gradient(block.forward(x.clone())));
}

#[test]
fn running_statistics_are_refused_before_they_change() {
    #[derive(Module, Debug)]
    struct Normed {
        norm: BatchNorm,
    }
    let device = Device::default().autodiff();
    let model = Normed { norm: BatchNormConfig::new(WIDTH).init(&device) };
    let x = Tensor::<2>::ones([3, WIDTH], &device);
    let run = || recompute(&model, x.clone(), |model, x| model.norm.forward(x));
    let message = refusal(run);
    assert!(message.contains("running statistics"), "{message}");
    let mean = model.norm.running_mean.value_sync().into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(mean, [0.0; WIDTH]);
}
