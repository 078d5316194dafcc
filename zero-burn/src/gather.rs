//! The one custom operation: forward gives the whole parameter, backward hands its gradient to the engine.
//!
//! It is registered memory bound, with a retro-forward, and prepared with balanced checkpointing whatever the
//! device's own strategy: Burn's tape keeps the stand-in, lets the gathered parameter go after forward, and gathers it
//! again where backward needs it.

use std::marker::PhantomData;
use std::sync::{Arc, Weak};

#[cfg(feature = "flex")]
use burn::backend::Flex;
use burn::backend::autodiff::Autodiff;
use burn::backend::autodiff::NodeId;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::retro_forward::RetroForward;
use burn::backend::autodiff::checkpoint::state::BackwardStates;
use burn::backend::autodiff::checkpoint::strategy::{
    BalancedCheckpointing, CheckpointStrategy, NoCheckpointing,
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind, OpsPrep};
use burn::backend::tensor::FloatTensor;
use burn::backend::{
    AutodiffBackend, Backend, DispatchKindConversion, DispatchTensor, TensorMetadata, backend_extension,
};
use burn::tensor::Tensor;
use zero_core::ParameterIndex;

use crate::ZeroError;
use crate::base::Base;
use crate::engine::Engine;
use crate::uses::Use;
use crate::watch;

/// One parameter of one engine: all that the operation needs to know.
#[derive(Clone)]
pub(crate) struct Source {
    pub(crate) engine: Arc<Engine>,
    pub(crate) parameter: ParameterIndex,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Source")
            .field(&self.engine.layout.parameters()[self.parameter.index()].name())
            .finish()
    }
}

impl Source {
    fn gather<B: Backend>(&self) -> FloatTensor<B>
    where
        DispatchTensor: DispatchKindConversion<B>,
    {
        let whole: FloatTensor<B> =
            self.engine.whole_or_nan(self.parameter).try_into_primitive::<B>().expect(
                "the engine keeps every parameter on the device, and so the backend, of its stand-in",
            );
        B::float_reshape(whole, self.engine.shape(self.parameter).into())
    }
}

/// The seam for devices: a backend joins by being listed here and by an implementation as short as Flex's.
#[backend_extension(Flex: cfg(feature = "flex"), Cube: cfg(feature = "cube"), Autodiff)]
pub(crate) trait GatherOps: Backend {
    fn gather(stand_in: FloatTensor<Self>, source: Source) -> FloatTensor<Self>;
}

#[cfg(feature = "flex")]
impl GatherOps for Flex {
    fn gather(_stand_in: FloatTensor<Self>, source: Source) -> FloatTensor<Self> {
        source.gather::<Self>()
    }
}

/// All CubeCL devices are of one backend, be operations fused or not.
#[cfg(feature = "cube")]
impl GatherOps for burn_cubecl::Cube {
    fn gather(_stand_in: FloatTensor<Self>, source: Source) -> FloatTensor<Self> {
        source.gather::<Self>()
    }
}

/// What the tape keeps of a gather. Burn frees an abandoned tape only when another backward runs: it must not keep the
/// engine alive until then.
#[derive(Clone, Debug)]
struct OnTape {
    source: WeakSource,
    version: u64,
    used: Arc<Use>,
}

/// An engine that may be gone.
#[derive(Clone)]
pub(crate) struct WeakSource {
    engine: Weak<Engine>,
    base: Weak<Base>,
    parameter: ParameterIndex,
}

impl std::fmt::Debug for WeakSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("WeakSource").field(&self.parameter).finish()
    }
}

impl WeakSource {
    pub(crate) fn new(source: &Source) -> Self {
        Self {
            engine: Arc::downgrade(&source.engine),
            base: Arc::downgrade(source.engine.base()),
            parameter: source.parameter,
        }
    }

    pub(crate) fn upgrade(&self) -> Option<Source> {
        if let Some(engine) = self.engine.upgrade() {
            return Some(Source { engine, parameter: self.parameter });
        }
        if let Some(base) = self.base.upgrade() {
            base.phase.note(ZeroError::Replaced);
        }
        None
    }
}

#[derive(Debug)]
struct GatherBackward;

impl<B: Backend> Backward<B, 2> for GatherBackward
where
    DispatchTensor: DispatchKindConversion<B>,
{
    type State = OnTape;

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let gradient = grads.consume::<B>(&ops.node);
        let OnTape { source, version, used } = ops.state;
        // The bucket asks how many uses are left, so this one has to be over.
        drop(used);
        // Without an engine, nobody wants the gradient.
        let Some(source) = source.upgrade() else { return };
        let numel = gradient.shape().num_elements();
        let flat = B::float_reshape(gradient, [numel].into());
        source.engine.receive_gradient(source.parameter, version, Tensor::from_primitive::<B>(flat));
        // Nothing is registered for the stand-in: the gradient lives in the engine.
    }
}

#[derive(Debug)]
struct GatherAgain<B> {
    stand_in: NodeId,
    source: WeakSource,
    backend: PhantomData<fn() -> B>,
}

impl<B: GatherOps> RetroForward for GatherAgain<B> {
    fn forward(&self, states: &mut BackwardStates, out_node: NodeId) {
        let stand_in = states.get_state::<B::FloatTensorPrimitive>(&self.stand_in);
        let source = self.source.upgrade().expect(
            "backward was called after the engine, its optimizer and its model were dropped or replaced: there is \
             nothing left to gather from",
        );
        states.save(out_node, B::gather(stand_in, source));
    }
}

impl<B: GatherOps, S: CheckpointStrategy> GatherOps for Autodiff<B, S>
where
    DispatchTensor: DispatchKindConversion<B>,
{
    fn gather(stand_in: FloatTensor<Self>, source: Source) -> FloatTensor<Self> {
        if !stand_in.is_tracked() {
            watch::see(&source);
            return Self::from_inner(B::gather(stand_in.into_primitive(), source));
        }
        let weak = WeakSource::new(&source);
        let again =
            GatherAgain::<B> { stand_in: stand_in.node().id(), source: weak.clone(), backend: PhantomData };
        let (uses, version) = (source.engine.uses.clone(), source.engine.version());
        let rung =
            source.engine.ladder.climb(|| Self::from_inner(stand_in.primitive().clone()), deepen::<B, S>);
        let whole = B::gather(stand_in.primitive().clone(), source);
        match GatherBackward
            .prepare::<BalancedCheckpointing>([stand_in.node(), rung.node()])
            .memory_bound()
            .retro_forward(again)
            .parents([&stand_in])
            .stateful()
        {
            OpsKind::Tracked(prepared) => {
                let used = Arc::new(Use::new(&uses, weak.parameter));
                prepared.finish(OnTape { source: weak, version, used }, whole)
            }
            OpsKind::UnTracked(prepared) => prepared.finish(whole),
        }
    }
}

/// Makes a tensor that is not tracked one step deeper; see [`Ladder`](crate::ladder::Ladder).
#[derive(Debug)]
struct Deepen;

impl<B: Backend> Backward<B, 1> for Deepen {
    type State = ();

    fn backward(self, _ops: Ops<Self::State, 1>, _grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        // What is not tracked has no gradient.
    }
}

fn deepen<B: Backend, S: CheckpointStrategy>(
    tensor: FloatTensor<Autodiff<B, S>>,
) -> FloatTensor<Autodiff<B, S>> {
    let (primitive, node) = tensor.into_parts();
    let prepared: OpsPrep<_, B, _, NoCheckpointing, 1> = Deepen.prepare([node]);
    prepared.compute_bound().stateless(primitive)
}
