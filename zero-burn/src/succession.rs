//! From one engine to the next: the same shards under another layout.
//!
//! The layout of an engine does not change. To freeze parameters, or to add some, a new engine takes over the base of the
//! old one, with its shards; parameters keep their indices, and with them windows and optimizer state.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use wildmatch::WildMatch;
use zero_core::ParameterSpec;

use crate::ZeroError;
use crate::agreement::agree;
use crate::engine::Engine;
use crate::shard::{build_and_deal, lay_out};
use crate::stand_in::{Attach, check_extended, check_model, detach};

/// Makes the parameters whose module path matches `pattern` trainable, or frozen.
pub(crate) fn set_trainable<M: Module>(
    old: &Arc<Engine>,
    device: &Device,
    model: M,
    pattern: &str,
    trainable: bool,
) -> Result<(M, Arc<Engine>), ZeroError> {
    let ready = old.check().and_then(|()| check_model(&model, old)).and_then(|held_back| {
        old.check_no_gradients()?;
        Ok(held_back)
    });
    let mut held_back = old.together(ready)?;
    let what = if trainable { "unfreeze" } else { "freeze" };
    old.fail(agree(old.comm.as_ref(), &[format!("{what} {pattern}")]))?;
    let matcher = WildMatch::new(pattern);
    let mut matches = 0;
    let specs = old.layout.parameters().iter().map(|parameter| {
        let spec = parameter.spec().clone();
        if !matcher.matches(parameter.name()) {
            return spec;
        }
        matches += 1;
        held_back.remove(&parameter.index());
        ParameterSpec { trainable, ..spec }
    });
    let specs = specs.collect();
    if matches == 0 {
        let example = old.layout.parameters().first().map_or("", |parameter| parameter.name()).to_owned();
        return Err(ZeroError::NoSuchParameter { pattern: pattern.to_owned(), example });
    }
    let layout = lay_out(old.base(), specs)?;
    old.settle_renewals()?;
    let engine = Engine::new(Arc::clone(old.base()), layout, old.ids.clone(), Some(old));
    let engine = Arc::new(old.together(engine)?);
    #[cfg(feature = "cube")]
    if engine.updating_port().is_some() {
        // They would keep the memory of all that go on to be updated.
        let _updating = engine.phase.begin_update();
        let parameters =
            engine.layout.parameters().iter().map(|parameter| (parameter.trainable(), parameter.index()));
        for (_, index) in parameters.filter(|(trainable, index)| !trainable && engine.is_by_itself(*index)) {
            engine.holdings.put_apart(index);
        }
    }
    let model = take_over(model, old);
    Ok((model.apply_reparameterization(Attach { engine: &engine, device, held_back }), engine))
}

/// Lets `add` make a larger model of the engine's, and shards what is new in it.
pub(crate) fn extend<M: Module, N: Module>(
    old: &Arc<Engine>,
    device: &Device,
    model: M,
    add: impl FnOnce(M, &Device) -> N,
) -> Result<(N, Arc<Engine>), ZeroError> {
    old.together(old.check().and_then(|()| check_model(&model, old)).and_then(|_| old.check_no_gradients()))?;
    old.settle_renewals()?;
    let seed = old.config.seed.wrapping_add(old.layout.parameters().len() as u64);
    let what = vec![String::from("extend")];
    let mut checked = Ok(HashSet::new());
    let build = |device: &Device| {
        let model = add(model, device);
        checked = check_extended(&model, old);
        model
    };
    let dealt = old.fail(build_and_deal(old, device, seed, Some(old), what, build))?;
    // The others are on their way to the new engine.
    let held_back = checked.inspect_err(|error| old.comm.abort(&error.to_string()))?;
    let (model, engine) = old.fail(dealt.take_up(old.base(), Some(old)))?;
    let model = take_over(model, old);
    Ok((model.apply_reparameterization(Attach { engine: &engine, device, held_back }), engine))
}

/// Ends the work of the old engine, and gives its model without it.
fn take_over<M: Module>(model: M, old: &Engine) -> M {
    let model = detach(model, old);
    // What it has gathered ahead is of no use any more.
    old.gathers.begin_round();
    model
}
