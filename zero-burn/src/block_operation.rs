//! The custom operation of a block that is run again: forward has been; backward runs what it was given.

use std::sync::{Arc, OnceLock};

#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Backend, DispatchKindConversion, DispatchTensor, TensorMetadata, backend_extension};
use burn::tensor::{Shape, Tensor};
use parking_lot::Mutex;

/// Tensors of floats that a block may take.
pub(crate) const INPUTS: usize = 4;

/// A gradient without its rank.
#[derive(Debug)]
pub(crate) struct Gradient {
    flat: Tensor<1>,
    shape: Shape,
}

impl Gradient {
    pub(crate) fn new<const D: usize>(gradient: Tensor<D>) -> Self {
        let shape = gradient.shape();
        Self { flat: gradient.reshape([shape.num_elements()]), shape }
    }

    fn into_primitive<B: Backend>(self) -> FloatTensor<B>
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        let flat = self.flat.try_into_primitive::<B>();
        B::float_reshape(flat.expect("a block's gradients are where its output is"), self.shape)
    }
}

/// What a block's backward gives.
#[derive(Debug)]
pub(crate) struct BlockGradients {
    /// By input; of those on the outer tape.
    pub(crate) inputs: Vec<Option<Gradient>>,
    /// Of parameters that are leaves of the outer tape.
    pub(crate) parameters: Vec<(NodeId, Gradient)>,
}

/// What backward does, once: from the gradient of the block's output, flat.
#[derive(Clone)]
pub(crate) struct Rerun(Arc<Mutex<Option<Job>>>);

type Job = Box<dyn FnOnce(Tensor<1>) -> BlockGradients + Send>;

impl Rerun {
    pub(crate) fn new(job: impl FnOnce(Tensor<1>) -> BlockGradients + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(job)))))
    }
}

impl std::fmt::Debug for Rerun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Rerun")
    }
}

/// Where the node of a leaf is noted.
pub(crate) type Leaf = Arc<OnceLock<NodeId>>;

/// A backend joins as to [`GatherOps`](crate::gather::GatherOps).
#[backend_extension(Flex: cfg(feature = "flex"), Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait BlockOperations: Backend {
    /// `output`, a constant, as what the others give; whoever has less of them repeats one that is not tracked.
    fn attach(
        output: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        third: FloatTensor<Self>,
        fourth: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        rerun: Rerun,
    ) -> FloatTensor<Self>;

    /// Notes the node of a tensor.
    fn leaf(tensor: FloatTensor<Self>, leaf: Leaf) -> FloatTensor<Self>;
}

macro_rules! without_autodiff {
    ($backend:ty) => {
        impl BlockOperations for $backend {
            fn attach(
                output: FloatTensor<Self>,
                _first: FloatTensor<Self>,
                _second: FloatTensor<Self>,
                _third: FloatTensor<Self>,
                _fourth: FloatTensor<Self>,
                _anchor: FloatTensor<Self>,
                _rerun: Rerun,
            ) -> FloatTensor<Self> {
                output
            }

            fn leaf(tensor: FloatTensor<Self>, _leaf: Leaf) -> FloatTensor<Self> {
                tensor
            }
        }
    };
}

#[cfg(feature = "flex")]
without_autodiff!(Flex);
#[cfg(feature = "cube")]
without_autodiff!(burn_cubecl::Cube);

#[derive(Debug)]
struct BlockBackward;

impl<B: Backend> Backward<B, { INPUTS + 1 }> for BlockBackward
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = Rerun;

    fn backward(
        self,
        ops: Ops<Self::State, { INPUTS + 1 }>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let gradient = grads.consume::<B>(&ops.node);
        let job = ops.state.0.lock().take().expect("Burn runs an operation's backward once");
        let numel = gradient.shape().num_elements();
        let flat = B::float_reshape(gradient, [numel].into());
        let BlockGradients { inputs, parameters } = job(Tensor::from_primitive::<B>(flat));
        for (parent, gradient) in ops.parents.iter().zip(inputs) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                grads.register::<B>(parent.id, gradient.into_primitive::<B>());
            }
        }
        for (leaf, gradient) in parameters {
            grads.register::<B>(leaf, gradient.into_primitive::<B>());
        }
        // Nobody asks for the anchor's.
    }
}

impl<B: BlockOperations, S: CheckpointStrategy> BlockOperations for Autodiff<B, S>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn attach(
        output: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        third: FloatTensor<Self>,
        fourth: FloatTensor<Self>,
        anchor: FloatTensor<Self>,
        rerun: Rerun,
    ) -> FloatTensor<Self> {
        let parents = [&first, &second, &third, &fourth, &anchor].map(|parent| parent.node());
        let output = output.into_primitive();
        match BlockBackward.prepare::<NoCheckpointing>(parents).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(rerun, output),
            OpsKind::UnTracked(prepared) => prepared.finish(output),
        }
    }

    fn leaf(tensor: FloatTensor<Self>, leaf: Leaf) -> FloatTensor<Self> {
        leaf.get_or_init(|| tensor.id());
        tensor
    }
}
