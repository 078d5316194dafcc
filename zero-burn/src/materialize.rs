//! Initial values, drawn in a fixed order.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use parking_lot::{ReentrantMutex, ReentrantMutexGuard};
use zero_core::ZeroConfig;

use crate::ZeroError;

/// Burn's CPU backend has one random generator for the whole process. Whoever draws initial values, or seeds it, holds this
/// lock, so that engines of one process do not take each other's numbers. It guards nothing of ours.
pub(crate) static GENERATOR: ReentrantMutex<()> = ReentrantMutex::new(());

/// The generator, waited for no longer than the configuration's deadline.
pub(crate) fn generator(config: &ZeroConfig) -> Result<ReentrantMutexGuard<'static, ()>, ZeroError> {
    let deadline = config.deadline();
    GENERATOR.try_lock_for(deadline).ok_or(ZeroError::GeneratorBusy { after: deadline })
}

/// Seeds `device`, builds a model and initialises every parameter, in the module's order.
///
/// Burn initialises a parameter at its first use, so the values that a seed gives depend on the order of use. This
/// gives the whole values whose shards [`Zero::shard`](crate::Zero::shard) deals out under the same seed. Waits while an
/// engine of this process deals out its own.
pub fn materialize<M: Module>(device: &Device, seed: u64, build: impl FnOnce(&Device) -> M) -> M {
    struct Touch;
    impl ModuleVisitor for Touch {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            drop(param.val());
        }
    }
    let _drawing = GENERATOR.lock();
    device.seed(seed);
    let model = build(device);
    model.visit(&mut Touch);
    model
}
