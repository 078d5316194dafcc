//! What an update of 32 M parameters takes, by Burn's AdamW and by `Fused`.

use burn::module::{Module, Param};
use burn::optim::AdamWConfig;
use burn::tensor::{Device, Tensor};
use serde_json::{Value, json};
use zero_burn::{
    Adam, Fused, LocalWorld, ShardOptimizer, WorldSize, Zero, ZeroConfig, ZeroError, ZeroOptimizer,
};

use crate::median;

const ROUNDS: usize = 7;
const NUMEL: usize = 32 << 20;

/// One parameter, of which the loss asks nothing but a gradient.
#[derive(Module, Debug)]
struct Flat {
    values: Param<Tensor<1>>,
}

struct Contender<O: ShardOptimizer> {
    zero: Zero,
    model: Flat,
    optimizer: ZeroOptimizer<O>,
}

impl<O: ShardOptimizer> Contender<O> {
    fn new(zero: Zero, optimizer: O) -> Result<Self, ZeroError> {
        let model =
            zero.shard(|device| Flat { values: Param::from_tensor(Tensor::ones([NUMEL], device)) })?;
        let optimizer = zero.optimizer(optimizer)?;
        Ok(Self { zero, model, optimizer })
    }

    /// Seconds of one update.
    fn seconds(&mut self) -> Result<f64, ZeroError> {
        self.zero.backward(self.model.values.val().square().mean())?;
        let outcome = self.optimizer.step(1e-3, &mut self.model)?;
        Ok(outcome.statistics.update_time.as_secs_f64())
    }
}

/// Rows of updates.
pub(crate) fn rows() -> Result<Vec<Value>, ZeroError> {
    let run = |comm: std::sync::Arc<dyn zero_burn::Communicator>| -> Result<[Vec<f64>; 2], ZeroError> {
        let engine = || Zero::new(ZeroConfig::default(), &comm, Device::default());
        let mut burn = Contender::new(engine()?, AdamWConfig::new().build())?;
        let mut fused = Contender::new(engine()?, Fused::new(Adam::ADAMW)?)?;
        let mut seconds: [Vec<f64>; 2] = Default::default();
        for round in 0..=ROUNDS {
            let times = [burn.seconds()?, fused.seconds()?];
            // The first makes the states.
            if round > 0 {
                seconds.iter_mut().zip(times).for_each(|(seconds, time)| seconds.push(time));
            }
        }
        Ok(seconds)
    };
    let runs = LocalWorld::new(WorldSize::ONE).run(run).unwrap_or_else(|error| panic!("{error}"));
    let [burn, fused] = &runs[0];
    let ratio = median(burn.iter().zip(fused).map(|(burn, fused)| burn / fused).collect());
    let row = |name: &str, seconds: &[f64]| json!({"name": name, "value": median(seconds.to_vec()) * 1e3, "unit": "ms", "bar": null, "pass": null});
    Ok(vec![
        row("update of 32 Mi parameters, Burn's AdamW", burn),
        row("update of 32 Mi parameters, Fused AdamW", fused),
        json!({
            "name": "update, Fused against Burn's AdamW", "value": ratio, "unit": "x", "bar": 3.0, "pass": ratio >= 3.0,
        }),
    ])
}
