//! Blocks whose activations are not kept: backward runs them again.

use std::hash::{DefaultHasher, Hasher};

use burn::backend::autodiff::NodeId;
use burn::backend::{Dispatch, DispatchTensor};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Gradients, Tensor};
use zero_comm::Region;

use crate::block_input::{BlockInput, FloatMap};
use crate::block_operation::{BlockGradients, BlockOperations, Gradient, INPUTS, Leaf, Rerun};
use crate::host::HostTensor;
use crate::materialize::GENERATOR;
use crate::{census, ladder, watch};

/// Gives `forward(block, input)`, and lets go of what backward would need of it but the input: backward runs the block
/// again, and then its backward. Costs one more forward of the block, and at stage 3 gathers its parameters once more.
///
/// Gradients are those without it: to the bit where operations of the device repeat to the bit, but for the order of sums
/// where an input or a parameter is used several times, in the block and outside. Works in any model, sharded or not, with
/// autodiff or without, and within another such block.
///
/// ```
/// use burn::{module::Module, nn::Linear, tensor::Tensor};
/// use zero_burn::recompute;
///
/// #[derive(Module, Debug)]
/// struct Model {
///     blocks: Vec<Block>,
/// }
///
/// #[derive(Module, Debug)]
/// struct Block {
///     wide: Linear,
///     narrow: Linear,
/// }
///
/// impl Block {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         x.clone() + self.narrow.forward(self.wide.forward(x).tanh())
///     }
/// }
///
/// impl Model {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.blocks.iter().fold(x, |x, block| recompute(block, x, Block::forward))
///     }
/// }
/// ```
///
/// What is differentiated are the floats of `input` and the parameters of `block`. `forward` is `Copy`, so that it cannot
/// hold a tensor whose gradient would be lost: numbers may be captured, tensors (a mask) go into `input`.
///
/// The block has to do the same again. One that draws random numbers (dropout) needs
/// [`recompute_seeded`]; layers that change when they are run (the running statistics of `BatchNorm`) stay outside.
///
/// # Panics
///
/// If the block has running statistics, a parameter that is computed from others, or a tensor that is no parameter and depends on
/// what is learned. In backward, if the block's output differs from that of forward, which is looked at on the CPU alone;
/// [`Zero::backward`](crate::Zero::backward) gives that as [`ZeroError::BackwardFailed`](crate::ZeroError::BackwardFailed).
pub fn recompute<M, I, F, const D: usize>(block: &M, input: I, forward: F) -> Tensor<D>
where
    M: Module + 'static,
    I: BlockInput,
    F: Fn(&M, I) -> Tensor<D> + Copy + Send + 'static,
{
    Block { forward, seed: None }.attach(block, input)
}

/// As [`recompute`], for a block that draws random numbers: Burn's generator is seeded with `seed` before each of its two
/// runs. Name another seed for each rank, step and block, or their numbers are the same.
///
/// After each run the generator is seeded anew with a number that follows from `seed`. Seeded blocks of one process run one
/// after the other, because on the CPU Burn has one generator for all threads; nothing else in the process may draw from it
/// meanwhile.
///
/// # Panics
///
/// As [`recompute`].
pub fn recompute_seeded<M, I, F, const D: usize>(block: &M, input: I, seed: u64, forward: F) -> Tensor<D>
where
    M: Module + 'static,
    I: BlockInput,
    F: Fn(&M, I) -> Tensor<D> + Copy + Send + 'static,
{
    Block { forward, seed: Some(seed) }.attach(block, input)
}

/// How to run a block.
#[derive(Clone, Copy)]
struct Block<F> {
    forward: F,
    seed: Option<u64>,
}

/// Which run of a block it is.
#[derive(Clone, Copy)]
enum Run {
    First,
    Again,
}

impl<F: Copy + Send + 'static> Block<F> {
    fn attach<M, I, const D: usize>(self, block: &M, input: I) -> Tensor<D>
    where
        M: Module + 'static,
        I: BlockInput,
        F: Fn(&M, I) -> Tensor<D>,
    {
        // Before the block is copied, for this initialises what is not yet: copies would draw values of their own.
        let mut leaves = Leaves::default();
        block.visit(&mut leaves);
        let mut parents = Parents::default();
        let input = input.map_floats(&mut parents);
        if leaves.0.iter().all(Option::is_none) && parents.tracked().all(|tracked| !tracked) {
            return self.run(block, input, Run::First);
        }
        assert!(
            !census::has_running_state(block),
            "recompute: a layer of the block has running statistics (as BatchNorm), which would change in each of its two \
             runs; leave that layer outside of the block"
        );

        let still = block.clone().map(&mut Still);
        let (output, uses) = watch::watch(|| self.run(&still, input.clone(), Run::First));
        drop(still);
        assert!(
            !output.is_tracked(),
            "recompute: a tensor in a field of the block, which is no parameter, depends on what is learned; its gradient \
             would be lost: pass it as an input"
        );
        // Nothing of the tape may be kept on the tape: leaves of their own for the run in backward.
        let own = block.clone().map(&mut Detach);
        let (digest, tracked, leaves) = (digest(&output), parents.tracked().collect::<Vec<_>>(), leaves.0);
        let rerun = Rerun::new(move |gradient| {
            uses.iter().for_each(watch::Watched::expect_unchanged);
            let input = input.map_floats(&mut RequireGrad(tracked.iter()));
            let gradients = ladder::inner_pass(|| {
                let output = self.run(&own, input.clone(), Run::Again);
                // The tape that was just made has tokens of its own.
                drop(uses);
                assert!(
                    digest == self::digest(&output),
                    "recompute: the block gave another output when it was run again: it draws random numbers (use \
                     `recompute_seeded`), or depends on something that has changed"
                );
                pull_back(output, gradient)
            });
            let mut of_inputs = InputGradients { gradients: gradients.as_ref(), found: Vec::new() };
            drop(input.map_floats(&mut of_inputs));
            let mut of_parameters = ParameterGradients {
                gradients: gradients.as_ref(),
                leaves: leaves.into_iter(),
                found: Vec::new(),
            };
            own.visit(&mut of_parameters);
            BlockGradients { inputs: of_inputs.found, parameters: of_parameters.found }
        });
        parents.attach(output, rerun)
    }

    fn run<M, I, const D: usize>(self, block: &M, input: I, run: Run) -> Tensor<D>
    where
        M: Module,
        I: BlockInput,
        F: Fn(&M, I) -> Tensor<D>,
    {
        let device = input.first_device().or_else(|| block.devices().into_iter().next());
        let (Some(seed), Some(device)) = (self.seed, device) else { return (self.forward)(block, input) };
        let _alone = GENERATOR.lock();
        device.seed(seed);
        let output = (self.forward)(block, input);
        let mut next = DefaultHasher::new();
        next.write_u64(seed);
        next.write_u8(run as u8);
        device.seed(next.finish());
        output
    }
}

/// The gradients that `gradient` of `output` leads to, on a tape that is used up by it.
fn pull_back<const D: usize>(output: Tensor<D>, gradient: Tensor<1>) -> Option<Gradients> {
    if !output.is_tracked() {
        return None;
    }
    let gradient = gradient.reshape::<D, _>(output.shape());
    // The product may overflow; nobody reads it.
    Some((output * gradient).sum().backward())
}

/// Tells outputs apart, in host memory.
fn digest<const D: usize>(output: &Tensor<D>) -> Option<u64> {
    let numel = output.shape().num_elements();
    let in_place = HostTensor::in_place(output.clone().inner().reshape([numel]))?;
    let mut hasher = DefaultHasher::new();
    hasher.write(in_place.bytes());
    Some(hasher.finish())
}

/// The nodes of the parameters that are tracked, in the order of visits.
#[derive(Default)]
struct Leaves(Vec<Option<NodeId>>);

impl ModuleVisitor for Leaves {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let base = param.base();
        assert!(
            base.is_require_grad() || !base.is_tracked(),
            "recompute: parameter {} of the block is computed from others; its gradient would be lost: compute it within the \
             block",
            param.id
        );
        let leaf = base.is_tracked().then(|| {
            let leaf = Leaf::default();
            drop(<Dispatch as BlockOperations>::leaf(base.into_dispatch(), leaf.clone()));
            leaf.get().copied()
        });
        self.0.push(leaf.flatten());
    }
}

/// What comes into a block, as it is on the tape; the block gets the same off the tape.
#[derive(Default)]
struct Parents(Vec<(DispatchTensor, bool)>);

impl FloatMap for Parents {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.0.push((tensor.clone().into_dispatch(), tensor.is_tracked()));
        if tensor.is_autodiff() { tensor.set_require_grad(false) } else { tensor }
    }
}

impl Parents {
    fn tracked(&self) -> impl Iterator<Item = bool> {
        self.0.iter().map(|(_, tracked)| *tracked)
    }

    /// `output` on the tape.
    fn attach<const D: usize>(self, output: Tensor<D>, rerun: Rerun) -> Tensor<D> {
        let untracked = output.clone().into_dispatch();
        // Without a tracked input, backward would pass by.
        let anchor = match self.tracked().any(|tracked| tracked) {
            true => untracked.clone(),
            false => Tensor::<1>::zeros([1], &output.device()).require_grad().into_dispatch(),
        };
        let mut parents = self.0.into_iter().map(|(tensor, _)| tensor);
        let [first, second, third, fourth] =
            std::array::from_fn::<_, INPUTS, _>(|_| parents.next().unwrap_or_else(|| untracked.clone()));
        Tensor::from_dispatch(<Dispatch as BlockOperations>::attach(
            untracked, first, second, third, fourth, anchor, rerun,
        ))
    }
}

/// Parameters off the tape.
struct Still;

impl ModuleMapper for Still {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| if value.is_autodiff() { value.set_require_grad(false) } else { value })
    }
}

/// Parameters as leaves of their own.
struct Detach;

impl ModuleMapper for Detach {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(Tensor::detach)
    }
}

/// Inputs as leaves, those that say so.
struct RequireGrad<'a>(std::slice::Iter<'a, bool>);

impl FloatMap for RequireGrad<'_> {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        match self.0.next() {
            Some(true) => tensor.require_grad(),
            _ => tensor,
        }
    }
}

struct InputGradients<'a> {
    gradients: Option<&'a Gradients>,
    found: Vec<Option<Gradient>>,
}

impl FloatMap for InputGradients<'_> {
    fn map<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.found.push(tensor.is_require_grad().then(|| {
            let gradient = self.gradients.and_then(|gradients| tensor.grad(gradients));
            // An input that the block does not use has one, too: what comes before it waits for it.
            Gradient::new(gradient.unwrap_or_else(|| tensor.clone().inner().zeros_like()))
        }));
        tensor
    }
}

struct ParameterGradients<'a> {
    gradients: Option<&'a Gradients>,
    leaves: std::vec::IntoIter<Option<NodeId>>,
    found: Vec<(NodeId, Gradient)>,
}

impl ModuleVisitor for ParameterGradients<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // Those of sharded parameters are the engine's already.
        if let (Some(leaf), Some(gradients)) = (self.leaves.next().flatten(), self.gradients)
            && let Some(gradient) = param.base().grad(gradients)
        {
            self.found.push((leaf, Gradient::new(gradient)));
        }
    }
}
